"""Log how many tokens each expert of each layer gets."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.layers.moe.layer import MoELayer


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
        layers = [child for child in module.modules() if isinstance(child, MoELayer)]
        for layer in layers:
            layer.logs_tokens = on
        if on and not layers:
            rank_zero_warn(
                f"ExpertLoadMonitor logs nothing: {type(module).__name__} has no layer of experts "
                "(MoELayer). Set moe in its model's config, or leave the callback out."
            )
