"""Learning-rate schedulers wait where an optimizer step was skipped; Lightning steps them after every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

from megatron_lightning.strategies.overrides import MethodOverrides


class HeldSchedulers:
    """Holds the schedulers that count steps, by the module's own hook; without any it leaves the hook alone.

    Args:
        module: Whose ``lr_scheduler_step`` steps them.
        configs: All schedulers of the run.
        is_skipped: Returns whether the last optimizer step was skipped.
    """

    def __init__(
        self, module: pl.LightningModule, configs: Sequence[LRSchedulerConfig], is_skipped: Callable[[], bool]
    ) -> None:
        self._overrides = MethodOverrides(module)
        counting = [config.scheduler for config in configs if config.interval == "step"]

        def lr_scheduler_step(original: Callable[..., None], scheduler: Any, metric: Any) -> None:
            if not (is_skipped() and any(scheduler is held for held in counting)):
                original(scheduler, metric)

        if counting:
            self._overrides.put("lr_scheduler_step", lr_scheduler_step)

    def release(self) -> None:
        """Give the hook back."""
        self._overrides.give_back()
