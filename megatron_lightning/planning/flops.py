"""Floating-point operations of a training step, as Megatron-LM counts operations. No torch here.

A matmul of [m, k] with [k, n] is 2 m k n operations. Backward has two matmuls for each matmul of
forward, so every multiply-add of forward is 6 operations. The count includes the matmuls of linear
layers with the tokens, of queries with keys, and of probabilities with values. Norms, activation
functions, the router, softmax and rotations do not count, and neither does recomputation: MFU is
computed from the operations of the model (https://arxiv.org/abs/2204.02311, appendix B).

Notation: ``h`` hidden, ``n`` heads, ``d`` head dim, ``f`` feed-forward size, ``v`` vocabulary. A
causal query sees half of a sequence on average, or less with a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.value_checks import check_kind, is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import (
    OUTPUT,
    Weight,
    has_attention,
    unit_names,
    unit_weights,
)
from megatron_lightning.planning.parameters import config_of, kind_of, predicting_layer_of

OPERATIONS_PER_WEIGHT = 6
"""Operations of a multiply-add of forward: 2, and twice as many in backward."""


def flops(
    config: TransformerConfig,
    *,
    batch_size: int,
    sequence_length: int,
    document_lengths: Sequence[int] | None = None,
) -> float:
    """Return the floating-point operations of an optimizer step, forward and backward.

    Args:
        config: The model.
        batch_size: Samples of the step, over all ranks.
        sequence_length: Tokens of a sample.
        document_lengths: Tokens of every document of a sample, for packed documents invisible to
            each other. Tokens beyond the sum are padding and do not count. None: a sample is a
            single document.

    Raises:
        ConfigError: If a number is not positive, or documents are longer than the sample.
    """
    check_kind("config", config, TransformerConfig)
    for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if not is_count(value):
            raise ConfigError(f"{name} is {value!r}; it must be a positive integer.")
    lengths = [sequence_length] if document_lengths is None else list(document_lengths)
    wrong = next((length for length in lengths if not is_count(length)), None)
    if wrong is not None:
        raise ConfigError(
            f"document_lengths has {wrong!r}; each length must be a positive integer."
        )
    if sum(lengths) > sequence_length:
        raise ConfigError(
            f"document_lengths are {sum(lengths)} tokens together, and sequence_length is "
            f"{sequence_length}. Raise sequence_length, or leave documents out."
        )
    sample = sum(multiply_adds(config, unit, lengths) for unit in unit_names(config))
    return float(OPERATIONS_PER_WEIGHT * batch_size * sample)


def multiply_adds(config: TransformerConfig, unit: str, lengths: Sequence[int]) -> float:
    """Return the multiply-adds of a unit's forward for a sample.

    Args:
        config: The model.
        unit: An element of ``GPTModel.pipeline_units()``.
        lengths: Tokens of every document of the sample.
    """
    tokens, depths = sum(lengths), config.num_predicting_layers
    if unit == OUTPUT:
        return float(tokens * (1 + depths) * config.hidden_size * config.vocab_size)
    if kind_of(config, unit) is None:
        return 0.0
    weights = unit_weights(config, unit)
    per_token = active_size(config, weights) + _counted_norms(config, unit)
    if not has_attention(weights):
        return float(tokens * per_token)
    window = config_of(config, unit).window_size
    pairs = sum(visible_pairs(length, window) for length in lengths)
    return tokens * per_token + pairs * pair_channels(config)


def visible_pairs(length: int, window_size: tuple[int, int] | None = None) -> float:
    """Return the number of visible (query, key) pairs of a causal sequence, as the area below the
    diagonal. Without a window the area is half of the square, equal to Megatron's number.
    """
    reach = length if window_size is None else min(length, window_size[0] + 1)
    return length * reach - reach * reach / 2


def pair_channels(config: TransformerConfig) -> int:
    """Return the multiply-adds of a query and a key in one layer: the dot product, and the product
    of the probability with the value.
    """
    mla = config.mla
    key, value = (
        (config.head_dim, config.head_dim) if mla is None else (mla.q_head_dim, mla.v_head_dim)
    )
    return config.num_attention_heads * (key + value)


def active_size(config: TransformerConfig, weights: Iterable[Weight]) -> int:
    """Return the elements of the matrices. Of experts, only the experts of one token count."""
    size = 0
    for weight in weights:
        if weight.kind != "matrix":
            continue
        if weight.experts is None or config.moe is None:
            size += weight.size
        else:
            size += weight.size // weight.experts * config.moe.router_topk
    return size


def _counted_norms(config: TransformerConfig, unit: str) -> int:
    """Return the norm weights that Megatron counts: norms of optional latents, and of multi-token
    prediction.
    """
    mla = config.mla
    latents = 0 if mla is None else (mla.q_lora_rank or 0) + mla.kv_lora_rank
    return latents + (0 if predicting_layer_of(unit) is None else 3 * config.hidden_size)
