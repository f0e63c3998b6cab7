"""Hooks that write into parameters of which tensor-parallel ranks hold shards: a warning, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.guards.watches.shard_draws import _varies
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DP2,
    SINGLE,
    TP2_PP2,
    TP2_TOY,
    Layout,
    assert_close,
    make_layout,
    run,
    single,
)

TP2_DP2 = make_layout("tp2-toy-dp2", 4, 2, **dict(TP2_TOY.options or ()))


def _columns(module: Any) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "linear1.weight" in name:
                parameter.div_(parameter.norm(dim=0, keepdim=True))


def _nothing(module: Any) -> None:
    pass


def _full(module: Any) -> None:
    strategy = module.trainer.strategy
    named = (
        strategy.full_tensors() if hasattr(strategy, "full_tensors") else module.named_parameters()
    )
    full = {name: tensor.detach().clone() for name, tensor in named}
    for name, tensor in full.items():
        if "linear1.weight" in name:
            tensor.div_(tensor.norm(dim=0, keepdim=True))
    module.load_state_dict(full, strict=False)


HOOKS: dict[str, Callable[[Any], None]] = {"columns": _columns, "nothing": _nothing, "full": _full}


class _Module(ToyModule):
    def __init__(self, write: str) -> None:
        super().__init__(num_layers=2)
        self.write = write

    def on_train_batch_end(self, *args: Any) -> None:
        HOOKS[self.write](self)


def _fit(layout: Layout, folder: str, write: str) -> tuple[list[str], dict[str, Tensor]]:
    trainer = layout.trainer(folder, max_epochs=2)
    module = _Module(write)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=layout.data_module())
    texts = [str(warning.message) for warning in caught]
    full = {} if layout == SINGLE else dict(trainer.strategy.full_tensors())  # type: ignore[attr-defined]
    full = full or module.state_dict()
    weights = {name: tensor.detach().clone() for name, tensor in full.items()}
    return [text for text in texts if "a hook has written into" in text], weights


@pytest.mark.slow
def test_a_hook_that_writes_shards_is_warned_of_once(tmp_path: Path) -> None:
    for rank, (texts, _) in enumerate(run(TP2_TOY, _fit, tmp_path, "columns")):
        assert len(texts) == (rank == 0)
        assert all("model.layers.0.linear1.weight, model.layers.1.linear1" in t for t in texts)
        assert all("full_tensors()" in text for text in texts)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "write"),
    [
        pytest.param(TP2_TOY, "nothing", id="no write"),
        pytest.param(DP2, "columns", id="no shards"),
        pytest.param(TP2_DP2, "nothing", id="gathered", marks=pytest.mark.slow),
        pytest.param(TP2_PP2, "nothing", id="stages", marks=pytest.mark.slow),
    ],
)
def test_no_warning_where_nothing_is_wrong(layout: Layout, write: str, tmp_path: Path) -> None:
    assert all(texts == [] for texts, _ in run(layout, _fit, tmp_path, write))


@pytest.mark.slow
def test_the_way_out_gives_the_weights_of_one_device(tmp_path: Path) -> None:
    # AdamW divides gradients that are zero but for rounding, those of the biases of keys.
    def compared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in weights.items() if "in_proj_bias" not in name}

    _, expected = single(_fit, "full")
    for texts, weights in run(TP2_TOY, _fit, tmp_path, "full"):
        assert texts == []
        assert_close(compared(weights), compared(expected), 1e-4)


def test_shards_that_are_no_numbers_are_no_draw() -> None:
    assert _varies(torch.arange(8.0)) and not _varies(torch.full((8,), torch.nan))
