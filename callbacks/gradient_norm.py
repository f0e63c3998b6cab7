"""Log the global gradient norm: one number for the whole model, whatever the layout."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from megatron_lightning.strategies.megatron import MegatronStrategy


class GradientNormMonitor(pl.Callback):
    """Logs the 2-norm of all gradients before clipping, once every optimizer step.

    Under :class:`MegatronStrategy` it is the norm over every axis, without double counting; under another strategy it is the
    norm of this rank's gradients.

    Args:
        name: Key under which it is logged.
    """

    def __init__(self, name: str = "grad_norm") -> None:
        self.name = name

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Compute and log the norm; a collective under MegatronStrategy."""
        if isinstance(trainer.strategy, MegatronStrategy):
            norm = trainer.strategy.gradient_norm()
        else:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        pl_module.log(self.name, norm, on_step=True, on_epoch=False)
