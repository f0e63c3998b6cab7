"""The module, groups, options and plugins shared by the parts of a run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from megatron_lightning.assembly.part import Part
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.progress import Progress


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """An assembled module in a run, on this rank."""

    module: pl.LightningModule
    """This rank's part of the user's module."""
    part: Part
    """Description of the module."""
    context: ParallelContext
    """Groups of this rank."""
    options: StrategyOptions
    """All settings of the user."""
    progress: Progress
    """Counts of the strategy."""
    precision: Precision
    """Lightning's precision plugin."""
    notes: dict[str, object] = field(default_factory=dict)
    """Notes of guards about the module, over its runs. A loaded checkpoint clears them."""
    undo: ExitStack
    """Restores replaced attributes of foreign objects at teardown."""
