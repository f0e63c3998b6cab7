"""Log how many tokens each expert of each layer gets."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.layers.moe.layer import MoELayer


class ExpertLoadMonitor(pl.Callback):
    """Log the tokens per expert, as ``tokens_per_expert/path of the layer/number``: summed over a
    batch and all ranks, equal on every rank, with dropped tokens included. In evaluation, ``val_``
    or ``test_`` stands before the name, and the sum is over all batches.

    The logs get a number for every expert of every layer. Without this callback, ``expert_load``
    sums up each layer in a single number. Under Lightning's own strategies each rank counts its own
    tokens.
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
