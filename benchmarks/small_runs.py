"""Small trainings on CPU processes, whose losses are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from megatron_lightning.strategies import MegatronStrategy


class Losses(pl.Callback):
    """Collects the loss of every training batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Note the loss of a batch."""
        self.values.append(float(args[2]["loss"]))


def num_ranks() -> int:
    """Return the number of ranks of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def one_epoch(options: Mapping[str, Any] | None, losses: Losses, **others: Any) -> pl.Trainer:
    """Return a quiet Trainer of one epoch over all ranks.

    Args:
        options: Options of the strategy. None: plain Lightning.
        losses: Collects the losses.
        others: Further options of the Trainer.
    """
    return pl.Trainer(
        strategy="auto" if options is None else MegatronStrategy(**options),
        accelerator="cpu",
        devices=num_ranks(),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[losses],
        **others,
    )
