"""Run a Lightning Trainer on the ranks of :func:`tests.helpers.ranks.run_ranks`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from megatron_lightning.config import LossScaleOptions
from megatron_lightning.strategies import MegatronMixedPrecision
from megatron_lightning.strategies.megatron import MegatronStrategy


def trainer(strategy: MegatronStrategy | str = "auto", **options: Any) -> pl.Trainer:
    """Return a quiet CPU Trainer over all ranks of this test."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:  # as under torchrun: the processes exist
        os.environ.update(
            TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
        )
    warnings.filterwarnings("ignore")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def precision_options(precision: str, growth_interval: int = 1000) -> dict[str, Any]:
    """Return the Trainer's options for a precision; on the CPU the string 16-mixed would mean
    bf16."""
    if precision != "16-mixed":
        return {"precision": precision}
    scale = LossScaleOptions(initial_scale=2.0**10, growth_interval=growth_interval)
    return {"plugins": [MegatronMixedPrecision("16-mixed", "cpu", scale)]}


class Losses(pl.Callback):
    """Collects the loss of every training batch and the gradient norm of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            self.norms.append(float(strategy.gradient_norm()))
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
