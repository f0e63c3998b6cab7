"""Attention of a model that is bound to context-parallel ranks."""

from __future__ import annotations

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.sequence_mixer import SequenceMixer
from megatron_lightning.parallel.shards.other_stages import present_modules


def check_attention_rows(num_ranks: int, rows: int, model: str) -> None:
    """Check that the plan of a model binds the model's attention to the ranks.

    Args:
        num_ranks: Context-parallel ranks.
        rows: Rows of the plans that bind attention, or another mixer of tokens.
        model: Name of the model, for the message.

    Raises:
        ConfigError: If the plan binds no attention.
    """
    if num_ranks > 1 and not rows:
        raise ConfigError(
            f"context_parallel_size is {num_ranks}, and no row of a sharding plan of {model} binds "
            "its attention to these ranks, so that a token would see those of one rank only. Build "
            "the attention from megatron_lightning.layers.CoreAttention and add a row "
            "ContextAttention() for it, or set context_parallel_size to 1."
        )


def bound_attention(module: nn.Module) -> dict[str, SequenceMixer]:
    """Return the attention modules in ``module``, and other mixers of tokens, bound to
    context-parallel ranks, by path.
    """
    return {
        path: child
        for path, child in present_modules(module)
        if isinstance(child, SequenceMixer) and child.shares_sequences
    }
