"""Training of a model recorded by megatron-core, with the recorded optimizer and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from megatron_lightning.models import GPTModel
from tests.helpers.oracle_model import ADAM


class RecordedModule(pl.LightningModule):
    """The recorded model, optimizer and loss.

    Args:
        build: Returns the full model with the recorded initial values.
    """

    sequence_dims: ClassVar[dict[str, int]] = {"tokens": 1, "labels": 1}

    def __init__(self, build: Callable[[], GPTModel]) -> None:
        super().__init__()
        self.build = build
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["tokens"], labels=batch["labels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAM)


def global_batch(parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return micro-batches one after another: tokens and labels."""
    tokens, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {"tokens": tokens, "labels": labels}
