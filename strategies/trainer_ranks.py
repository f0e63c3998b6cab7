"""Groups, run and shards of a Trainer's rank, under any strategy."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.strategies.megatron import MegatronStrategy
from megatron_lightning.strategies.run import Run


def context_of(trainer: pl.Trainer, user: str) -> ParallelContext:
    """Return the groups of this rank.

    Args:
        trainer: The Trainer.
        user: Name of the callback that asks, for messages.

    Raises:
        ConfigError: If another strategy has several ranks.
    """
    if isinstance(trainer.strategy, MegatronStrategy):
        return trainer.strategy.context
    if trainer.world_size > 1:
        raise ConfigError(
            f"{user} has {trainer.world_size} ranks under {type(trainer.strategy).__name__}, and "
            "knows the ranks' parts only of MegatronStrategy. Use it, or one device."
        )
    return ParallelContext(ParallelLayout(), device=trainer.strategy.root_device, alone=True)


def run_of(trainer: pl.Trainer) -> Run | None:
    """Return the run of MegatronStrategy. None: another strategy."""
    return trainer.strategy.run if isinstance(trainer.strategy, MegatronStrategy) else None


def specs_of(trainer: pl.Trainer) -> Mapping[str, ShardSpec]:
    """Return the spec of each parameter on this rank. Empty on one device."""
    run = run_of(trainer)
    return {} if run is None else run.part.specs
