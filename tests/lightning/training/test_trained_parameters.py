"""A module may expect that everything it trains receives gradients; others may leave parameters
unused, as they always could."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    ONE,
    PP2,
    Layout,
    layouts,
    make_layout,
    run,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class AdaptedLayer(nn.TransformerEncoderLayer):
    reads = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(*args, **kwargs)
        return output + self.adapter if self.reads else output


class Adapted(ToyModule):
    """Layers with a parameter each, read from step ``reads_from`` of the fit on; never if None."""

    def __init__(self, expects: bool, reads_from: int | None) -> None:
        super().__init__()
        self.expects = expects
        self.reads_from = reads_from

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if self.model is None or not is_new:
            return
        for layer in self.model.layers.values():
            layer.__class__ = AdaptedLayer
            layer.adapter = nn.Parameter(torch.zeros(1))
        self.model.layers["1"].expects_gradients = self.expects
        self.model.layers["2"].expects_gradients = self.expects

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.model.layers.values():
            layer.reads = self.reads_from is not None and batch_idx >= self.reads_from


def _refusal(layout: Layout, folder: str, steps: int, *args: Any) -> tuple[str, int]:
    """Return the error, and the number of steps before it."""
    trainer = layout.trainer(folder, max_steps=steps, limit_val_batches=0, max_epochs=-1)
    try:
        trainer.fit(Adapted(*args), datamodule=layout.data_module())
    except ConfigError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def _refusals(layout: Layout, folder: str) -> dict[str, tuple[str, int]]:
    return {  # the last one breaks the connections of the ranks
        "late": _refusal(layout, folder, 5, True, 2),
        "unasked": _refusal(layout, folder, 5, False, None),
        "never": _refusal(layout, folder, 5, True, None),
    }


@pytest.mark.slow
@layouts(PP2, FSDP2, ONE, DDP2)
def test_unused_parameters_are_named_where_they_are_expected(
    layout: Layout, tmp_path: Path
) -> None:
    for found in run(layout, _refusals, tmp_path):
        assert found["late"] == ("", 5) and found["unasked"] == ("", 5)
        message, step = found["never"]
        assert "model.layers.1.adapter, model.layers.2.adapter" in message
        assert "2 trained parameters had no gradient in the first 4 optimizer steps" in message
        assert step in {3, 4}  # the fourth step has changed the weights


def test_a_fit_of_few_steps_is_judged_at_its_end(tmp_path: Path) -> None:
    message, _ = _refusal(ONE, str(tmp_path), 2, True, None)
    assert "had no gradient in the first 2 optimizer steps: model.layers.1.adapter" in message
