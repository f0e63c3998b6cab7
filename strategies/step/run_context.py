"""The module, groups, options and plugins that the parts of a run share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from megatron_lightning.assembly.part import Part
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.strategies.options import StrategyOptions
from megatron_lightning.strategies.progress import Progress


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """An assembled module in one run, on this rank."""

    module: pl.LightningModule
    """This rank's part of the user's module."""
    part: Part
    """Its description."""
    context: ParallelContext
    """Groups of this rank."""
    options: StrategyOptions
    """All that the user set."""
    progress: Progress
    """Counts of the strategy."""
    precision: Precision
    """Lightning's precision plugin."""
    undo: ExitStack
    """Restores at teardown what is replaced on foreign objects."""
