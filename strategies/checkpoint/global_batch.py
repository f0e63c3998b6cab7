"""Keep the global batch of a run resumed on another number of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from megatron_lightning.config.global_batch import StepSize
from megatron_lightning.lightning_internals.loaders import training_loaders


def step_size(trainer: pl.Trainer, num_replicas: int) -> StepSize | None:
    """Return the global batch of this run. None: several loaders, or a loader without a batch
    size.
    """
    loaders = training_loaders(trainer)
    batch_size = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    if not isinstance(batch_size, int):
        return None
    return StepSize(num_replicas, batch_size, trainer.accumulate_grad_batches)


def keep_global_batch(
    trainer: pl.Trainer,
    before: Mapping[str, Any] | None,
    num_replicas: int,
    *,
    is_sized_by_launcher: bool,
) -> None:
    """Accumulate more or fewer batches if the launcher has changed the number of ranks.

    Sizes set by the user hold. If the global batch then differs from the checkpoint's, a warning
    says so.

    Args:
        trainer: The Trainer, about to train.
        before: Global batch of the checkpoint's run. None: unknown, or no checkpoint.
        num_replicas: Data-parallel ranks.
        is_sized_by_launcher: Whether torchrun has set the number of ranks.

    Raises:
        ConfigError: If no whole number of batches keeps the global batch.
    """
    size = step_size(trainer, num_replicas)
    if before is None or size is None or size == StepSize(**before):
        return
    then = StepSize(**before)
    batches = size.accumulated_as(then) if is_sized_by_launcher else None
    if batches is not None:
        trainer.accumulate_grad_batches = batches
        # Lightning's loop counts batches. The new number of batches has to mean the same samples.
        _rescale_progress(trainer, batches, then.accumulated)
        rank_zero_info(
            f"MegatronStrategy: {num_replicas} data-parallel ranks instead of "
            f"{then.num_replicas}: accumulate_grad_batches={batches} keeps a step at "
            f"{then.samples} samples."
        )
    elif size.samples != then.samples:
        rank_zero_warn(
            f"a step of the checkpoint's run had {then.describe()}, and a step of this run has "
            f"{size.describe()}: learning rates may not fit. Set batch_size or "
            "accumulate_grad_batches so that the product stays, or global_batch_size in a data "
            "module that has it."
        )


def _rescale_progress(trainer: pl.Trainer, batches: int, before: int) -> None:
    """Convert the count of finished batches to this run's accumulation. Steps end at multiples.

    A save at the end of a batch has not counted this batch as completed.
    """
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current
    uncounted = num_batches.ready - num_batches.completed
    for name in ("ready", "started", "processed"):
        setattr(num_batches, name, getattr(num_batches, name) * batches // before)
    num_batches.completed = num_batches.ready - uncounted
