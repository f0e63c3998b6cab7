"""Floating-point operations of a training step, as Megatron-LM counts them. No torch here.

A product of [m, k] with [k, n] is 2 m k n operations, and backward has two products for each of
forward's, so every multiply-add of forward is 6 operations. Counted are the products of linear
layers with the tokens, of queries with keys, and of probabilities with values; norms, activation
functions, the router, softmax and rotations are not, and neither is recomputation: these are the
operations of the model, from which MFU is computed (https://arxiv.org/abs/2204.02311, appendix B).

Notation: ``h`` hidden, ``n`` heads, ``d`` head dim, ``f`` feed-forward size, ``v`` vocabulary. A
causal query sees half of a sequence on average; with a sliding window, what the window leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.config import LayerKind, TransformerConfig
from megatron_lightning.config.checks import check_kind, is_count
from megatron_lightning.errors import ConfigError

OPERATIONS_PER_WEIGHT = 6
"""Of one multiply-add of forward: 2, and twice as many in backward."""


def flops(
    config: TransformerConfig,
    *,
    batch_size: int,
    sequence_length: int,
    document_lengths: Sequence[int] | None = None,
) -> float:
    """Return the floating-point operations of one optimizer step, forward and backward.

    Args:
        config: The model.
        batch_size: Samples of the step, over all ranks.
        sequence_length: Tokens of a sample.
        document_lengths: Tokens of every document of a sample, where samples pack documents that
            do not see each other; tokens beyond their sum are padding and do not count. None: a
            sample is one document.

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
    tokens = sum(lengths)
    pairs = sum(visible_pairs(length, config.window_size) for length in lengths)
    depths, kinds = config.num_predicting_layers, config.layer_kinds + config.predicting_kinds
    layers = sum(layer_weights(config, kind) for kind in kinds) + depths * joining_weights(config)
    head = config.hidden_size * config.vocab_size
    multiply_adds: float = tokens * (layers + (1 + depths) * head)
    multiply_adds += pairs * pair_channels(config) * len(kinds)
    return float(OPERATIONS_PER_WEIGHT * batch_size * multiply_adds)


def visible_pairs(length: int, window_size: tuple[int, int] | None = None) -> float:
    """Return how many pairs of a query and a key it sees a causal sequence has, as the area below
    the diagonal: half of the square without a window, which is Megatron's number.
    """
    reach = length if window_size is None else min(length, window_size[0] + 1)
    return length * reach - reach * reach / 2


def pair_channels(config: TransformerConfig) -> int:
    """Return the multiply-adds of one query and key in one layer: their product, and that of the
    probability with the value.
    """
    mla = config.mla
    key, value = (
        (config.head_dim, config.head_dim) if mla is None else (mla.q_head_dim, mla.v_head_dim)
    )
    return config.num_attention_heads * (key + value)


def layer_weights(config: TransformerConfig, kind: LayerKind) -> int:
    """Return the weights that one token is multiplied with in a layer."""
    return _attention_weights(config) + _feed_forward_weights(config, kind)


def joining_weights(config: TransformerConfig) -> int:
    """Return the weights that one token is multiplied with in a layer of multi-token prediction,
    beyond those of a layer; Megatron counts the three norms.
    """
    return config.hidden_size * (2 * config.hidden_size + 3)


def _attention_weights(config: TransformerConfig) -> int:
    h, n, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is not None:
        return mla.num_parameters(h, n, norms=1)  # Megatron counts the latents' norms
    return h * (config.qkv_rows + n * config.head_dim)


def _feed_forward_weights(config: TransformerConfig, kind: LayerKind) -> int:
    matrices = 3 if config.gated else 2
    if config.moe is None or kind == "dense":
        return matrices * config.hidden_size * config.ffn_size
    shared = config.moe.shared_expert_intermediate_size or 0
    width = config.moe.router_topk * config.expert_ffn_size + shared
    return matrices * config.hidden_size * width
