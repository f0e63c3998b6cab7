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

from collections.abc import Sequence

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.value_checks import check_kind, is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import unit_names
from megatron_lightning.models.costs import multiply_adds

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
    wrong_length = next((length for length in lengths if not is_count(length)), None)
    if wrong_length is not None:
        raise ConfigError(
            f"document_lengths has {wrong_length!r}; each length must be a positive integer."
        )
    if sum(lengths) > sequence_length:
        raise ConfigError(
            f"document_lengths are {sum(lengths)} tokens together, and sequence_length is "
            f"{sequence_length}. Raise sequence_length, or leave documents out."
        )
    sample = sum(multiply_adds(config, unit, lengths) for unit in unit_names(config))
    return float(OPERATIONS_PER_WEIGHT * batch_size * sample)
