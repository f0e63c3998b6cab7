"""The last losses of a fit, for lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megatron_lightning.lightning_internals.trainer import known_metrics


class LastLosses:
    """Losses as the module logs them, or else the loss of the last batch on rank 0."""

    def __init__(self) -> None:
        self._returned: Tensor | None = None

    def keep(self, outputs: Any) -> None:
        """Keep the outputs of a training step, without waiting for the device."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._returned = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def texts(self, trainer: pl.Trainer) -> list[str]:
        """Return "name value" of every loss. Waits for the device, and for no other rank."""
        known = known_metrics(trainer)
        losses = {name: v for name, v in known.items() if "loss" in name.lower() and v.numel() == 1}
        # Logged for steps and epochs: the value of the step is the last one.
        for name in [name for name in losses if f"{name}_step" in losses]:
            losses[name] = losses.pop(f"{name}_step")
            losses.pop(f"{name}_epoch", None)
        if not losses and self._returned is not None:
            # Lightning has divided the loss that is to be accumulated.
            is_divided = trainer.lightning_module.automatic_optimization
            factor = trainer.accumulate_grad_batches if is_divided else 1
            losses = {"loss": self._returned * factor}
        return [f"{name} {float(value):.4g}" for name, value in losses.items()]
