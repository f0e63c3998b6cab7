"""Log how many tokens each expert of each layer gets."""

from __future__ import annotations

import lightning.pytorch as pl

from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.parallel.absent import present_modules


class ExpertLoadMonitor(pl.Callback):
    """Log the tokens that chose each expert, as ``tokens_per_expert/path of the layer/number``:
    summed over a batch (in evaluation, with ``val_`` or ``test_`` before the name, over all
    batches) and all ranks, equal on each, and with those that are dropped.

    That is a number for every expert of every layer; without this callback, ``expert_load`` sums
    them up in one number a layer. Under Lightning's own strategies each rank counts its own tokens.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the layers' reports on."""
        self._switch(pl_module, on=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the layers' reports on."""
        self._switch(pl_module, on=True)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the layers' reports on."""
        self._switch(pl_module, on=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Switch the layers' reports off."""
        self._switch(pl_module, on=False)

    def _switch(self, module: pl.LightningModule, *, on: bool) -> None:
        for _, child in present_modules(module):
            if isinstance(child, MoELayer):
                child.logs_tokens = on
