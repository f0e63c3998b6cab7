"""Length of the rows of a batch: that of its longest text, in multiples that the run can divide."""

from __future__ import annotations

from math import lcm
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.config import TransformerConfig

DEFAULT = 64
_QUANTIZED = 32
"""Tokens of a rank that recipes with scaled blocks multiply at once."""


def row_multiple(
    trainer: pl.Trainer | None, module: object, length: int, pad_to: int | None
) -> int | None:
    """Return the multiple for the lengths of rows. None: all rows keep the full length.

    Args:
        trainer: Reader of the batches. None: unknown.
        module: Module of the run. Experts that are filled to a capacity keep the full length.
        length: Full length.
        pad_to: The user's multiple. None: :data:`DEFAULT`, or the full length if blocks of layers
            are compiled, which would be compiled for each length.
    """
    strategy: Any = None if trainer is None else trainer.strategy
    is_compiled = getattr(getattr(strategy, "options", None), "compile", None) is not None
    if pad_to is None:
        pad_to = length if is_compiled else DEFAULT
    config = getattr(module, "config", None)
    moe = config.moe if isinstance(config, TransformerConfig) else None
    if moe is not None and moe.pad_expert_input_to_capacity:
        return None
    layout = getattr(strategy, "layout", None)
    # Context parallelism divides rows into two chunks a rank, and tensor parallelism each chunk.
    divisor = 1 if layout is None else 2 * layout.cp * layout.tp
    if hasattr(getattr(trainer, "precision_plugin", None), "recipe"):
        divisor *= _QUANTIZED
    multiple = lcm(pad_to, divisor)
    return multiple if multiple < length else None


def first_rows(trainer: pl.Trainer | None, batch_size: int) -> int:
    """Return the rows of the first batch of all data-parallel ranks."""
    strategy: Any = None if trainer is None else trainer.strategy
    shares: Any = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return batch_size * int(shares.get("num_replicas", 1))
