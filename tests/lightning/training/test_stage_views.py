"""Ordinary code around a partitioned model: choose layers by index, read a step's outputs, weight
samples by fractions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader


class _ByIndex(VectorModule):
    """Trains layers at rates that depend on their place, and freezes one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        net: Any = self.net
        for parameter in net[2].parameters():
            parameter.requires_grad_(False)
        groups = [
            {"params": list(net[place].parameters()), "lr": 0.1 * 0.5**place}
            for place in range(len(net))
        ]
        groups[-1]["params"] = list(net[-1:].parameters())
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _fitted(layout: Layout, folder: str, kind: type[VectorModule]) -> dict[str, float]:
    fitted = layout.trainer(folder, max_epochs=2)
    fitted.fit(kind(), loader(layout), loader(layout))
    return metrics_of(fitted)


@pytest.mark.slow
@layouts(PP2, MICRO, PP2_DP2)
def test_layers_are_chosen_by_index(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _fitted, tmp_path, _ByIndex):
        assert_close(rank, single(_fitted, _ByIndex))


class _Outputs(pl.Callback):
    """Sums of what steps return, logged after the batch: the same on every rank."""

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any
    ) -> None:
        assert outputs["scores"].dtype == torch.bfloat16 and outputs["right"].dtype == torch.bool
        scores = outputs["scores"].float()
        module.log("scores", scores.sum(), batch_size=len(scores), sync_dist=True)
        module.log("right", outputs["right"].float().mean(), batch_size=len(scores), sync_dist=True)


class _ReadsOutputs(VectorModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        scores = self.net(batch[0])
        return {"loss": F.cross_entropy(scores, batch[1]), "scores": scores.detach()}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        scores = self.net(batch[0])
        return {
            "scores": scores.round().bfloat16(),
            "right": scores.argmax(1) == batch[1],
            "empty": scores[:, :0],
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_outputs", outputs["scores"].square().mean(), sync_dist=True)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [_Outputs()]


@layouts(PP2, slow=[MICRO, PP2_DP2])
def test_hooks_read_the_outputs_of_steps_on_every_rank(layout: Layout, tmp_path: Path) -> None:
    expected = single(_fitted, _ReadsOutputs)
    assert expected["right"] > 0
    for rank in run(layout, _fitted, tmp_path, _ReadsOutputs):
        if layout.data > 1:  # a sum over half of the batch
            rank["scores"] *= layout.data
        assert_close(rank, expected)


class _Fractions(VectorModule):
    """Weights of samples that add up to less than one for a whole batch; SGD feels a wrong
    scale."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        weights = 0.01 * (1 + batch[1])
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "num_items": weights.sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@layouts(MICRO, slow=[PP2, DP2, DDP2, PP2_DP2])
def test_items_may_be_weights_that_add_up_to_less_than_one(layout: Layout, tmp_path: Path) -> None:
    expected = single(_fitted, _Fractions)
    for rank in run(layout, _fitted, tmp_path, _Fractions):
        assert_close(rank, expected)
