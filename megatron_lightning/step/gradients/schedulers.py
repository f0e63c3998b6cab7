"""Learning-rate schedulers wait after a skipped optimizer step, although Lightning steps schedulers
after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

from megatron_lightning.step.overrides import override


def hold_schedulers(
    module: pl.LightningModule,
    configs: Sequence[LRSchedulerConfig],
    is_skipped: Callable[[], bool],
    undo: ExitStack,
) -> None:
    """Hold the schedulers that count steps if the last optimizer step was skipped, until ``undo``
    is closed.
    """
    counting = [config.scheduler for config in configs if config.interval == "step"]

    def lr_scheduler_step(original: Callable[..., None], scheduler: Any, metric: Any) -> None:
        if not (is_skipped() and any(scheduler is counted for counted in counting)):
            original(scheduler, metric)

    if counting:
        override(module, "lr_scheduler_step", lr_scheduler_step, undo)
