"""DataLoaders of a run: each data-parallel rank's share, with an equal number of batches on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len

from megatron_lightning.data.order.skipped import SkippedSamples
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.step.loaders.agreed_loader import Agreement, agreed_loader
from megatron_lightning.step.loaders.batch_counts import check_loader, forwards_together
from megatron_lightning.step.loaders.saved_loader import saved_loader
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.strategies.step.loaders.dataloaders import prepared_loader


def shared_loader(
    loader: object,
    trainer: pl.Trainer,
    context: ParallelContext,
    options: StrategyOptions,
    *,
    injects_samplers: bool,
    consumed: int,
    skipped: SkippedSamples,
    reduces: Callable[[], bool],
) -> object:
    """Return a loader of a data-parallel rank's share of the user's loader. A collective.

    Args:
        loader: The user's.
        trainer: The Trainer that reads the loader.
        context: Groups of this rank.
        options: The strategy's.
        injects_samplers: Whether samplers are exchanged.
        consumed: Number of samples before the first sample to read.
        skipped: Samples passed over by training.
        reduces: Returns whether evaluation steps call collectives of the data-parallel ranks.

    Raises:
        ConfigError: If ranks cannot read the loaders together.
    """
    loader = prepared_loader(
        loader,
        trainer,
        context.dp,
        injects_samplers=injects_samplers,
        consumed=consumed,
        micro_batch_size=options.micro_batch_size,
        skipped=skipped,
    )
    if trainer.training:
        loader = saved_loader(loader)
    stage = trainer.state.stage
    if context.dp.size == 1 or stage is None:
        return loader
    check_loader(loader, stage, context.axis("world"))
    # Loaders with a length were compared above. Without a length, only asking before each batch
    # shows that a rank has ended.
    if sized_len(loader) is not None:
        return loader
    together = trainer.training or forwards_together(options, context)
    agreement = Agreement(
        stage.dataloader_prefix or "",
        context.dp,
        context.device,
        together=lambda: together or reduces(),
    )
    return agreed_loader(loader, agreement)
