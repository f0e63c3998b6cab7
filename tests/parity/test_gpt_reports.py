"""Losses that the layers of GPTModel report, where ranks share a sequence or its activations: equal
to one process under plain Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.layers import StepReport
from megatron_lightning.models.transformer_layers import TransformerLayer
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.grid.context import AxisGroup
from tests.helpers.language_model import SEQUENCE, VOCABULARY, small_gpt
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

BATCH, STEPS = 4, 3
# name: strategy, over which ranks activations of a sequence are divided
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "native": ({}, ""),
    "pp2": ({"pipeline_model_parallel_size": 2, "micro_batch_size": 1}, ""),
    "tp2": ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, ""),
    "tp2-sp": ({"tensor_model_parallel_size": 2}, "tp"),
    "cp2": ({"context_parallel_size": 2, "micro_batch_size": 2}, "cp"),
}


class _Layer(TransformerLayer):
    """Reports a loss that does not add up over tokens, of each sample."""

    report: StepReport
    axis: AxisGroup | None

    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        hidden = super().forward(hidden, *args)
        sizes = hidden.square().sum(dim=(0, 2)) / (SEQUENCE * hidden.shape[2])
        if self.axis is not None:
            sizes = reduce_from_axis(sizes, self.axis)
            if self.axis.name == "cp":
                sizes = copy_to_axis(sizes, self.axis)
        return self.report.loss("aux_loss", 0.1 * sizes.square().mean(), hidden)


class _Module(GPTLightningModule):
    def __init__(self, divided_over: str) -> None:
        super().__init__(small_gpt(4), learning_rate=1e-2)
        self.divided_over = divided_over

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        axis = self.trainer.strategy.context.axis(self.divided_over) if self.divided_over else None
        for layer in self.model.decoder.layers.values():
            layer.__class__ = _Layer
            layer.report = StepReport()
            layer.axis = axis

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(layout: str | None, masked: bool) -> dict[str, Any]:
    options, divided = LAYOUTS[layout] if layout else (None, "")
    text = torch.randint(
        0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3)
    )
    rows: Any = [{"tokens": t[:-1], "labels": t[1:].clone()} for t in text]
    for row in rows if masked else ():  # the first half of every sequence: ranks differ
        row["labels"][1:3] = -100
    loader = DataLoader(rows, batch_size=BATCH)
    run = fit(options, _Module(divided), loader, loader, steps=STEPS, log_every_n_steps=1)
    return {"losses": run.losses, "norms": run.norms, "logged": run.logged}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_what_several_ranks_hold(layout: str, masked: bool) -> None:
    expected = run_ranks(1, _train, None, masked)[0]
    assert {"train_loss", "val_loss", "aux_loss", "val_aux_loss"} == expected["logged"].keys()
    ranks = 1 if layout == "native" else 2
    for rank in run_ranks(ranks, _train, layout, masked):
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["logged"] == pytest.approx(expected["logged"], rel=1e-5)
