"""LayerStatistics: sums over tokens are equal on every layout, and padding is in none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.callbacks import LayerStatistics
from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import LAYOUTS, Layout, make_layout, tiny_config, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer

TOLERANCE = 1e-6
PADDED = 6


def _rows(padded: int) -> list[dict[str, Any]]:
    rows = token_rows(8, 16, 64)
    for row in rows:
        row["padding"] = torch.arange(16) >= 16 - padded
        if padded:
            row["labels"] = row["labels"].masked_fill(row["padding"], -100)
            row["tokens"] = row["tokens"].masked_fill(row["padding"], 9)
    return rows


def _validate(layout: Layout, path: str, padded: int = PADDED, cut: bool = False) -> None:
    pl.seed_everything(1, verbose=False)
    moe = MoEConfig(num_experts=4, router_topk=2, layer_freq=(0, 1))
    module = GPTLightningModule(tiny_config(num_query_groups=2, activation="swiglu", moe=moe))
    rows = _rows(padded)
    if cut:
        rows = [{name: x[: 16 - PADDED] for name, x in row.items()} for row in rows]
    loader = DataLoader(rows, batch_size=4 // layout.data)
    run = trainer(layout.strategy(), callbacks=[LayerStatistics(path)])
    run.validate(module, loader, verbose=False)


def _differences(first: Path, second: Path) -> dict[str, float]:
    a, b = Statistics.load(first).entries, Statistics.load(second).entries
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return {k: float((x - b[k]).abs().max() / x.abs().max().clamp(min=1e-30)) for k, x in a.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "alone"
    _validate(LAYOUTS["single"], str(path))
    return path


LONG = [
    LAYOUTS["pp2"], LAYOUTS["ep2"], LAYOUTS["fsdp2"], make_layout("dp2", 2), make_layout(
    "tp2-nosp", 2, tp=2, sequence_parallel=False, expert_tensor_parallel_size=1),
]  # fmt: skip
SHORT = [
    LAYOUTS["cp2"],
    make_layout("tp2-ep2", 2, tp=2, ep=2, expert_tensor_parallel_size=1),
]


@pytest.mark.parametrize(
    "layout",
    [*SHORT, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LONG)],
    ids=lambda layout: layout.name,
)
def test_statistics_are_those_of_one_device(layout: Layout, alone: Path, tmp_path: Path) -> None:
    run_ranks(layout.ranks, _validate, layout, str(tmp_path / "file"))
    found = _differences(alone, tmp_path / "file")
    assert max(found.values()) < TOLERANCE, found


def test_padding_is_in_no_sum(alone: Path, tmp_path: Path) -> None:
    _validate(LAYOUTS["single"], str(tmp_path / "cut"), 0, True)
    found = _differences(alone, tmp_path / "cut")
    assert max(found.values()) < TOLERANCE, found
    entries = Statistics.load(alone).entries
    assert float(entries["decoder.layers.0/tokens"]) == 8 * (16 - PADDED)
    assert float(entries["decoder.layers.1.mlp.experts/tokens"].sum()) == 2 * 8 * (16 - PADDED)
    _validate(LAYOUTS["single"], str(tmp_path / "full"), 0)
    assert max(_differences(alone, tmp_path / "full").values()) > 0.1


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no blocks decoder\.layers\.N"):
        trainer(callbacks=[LayerStatistics(tmp_path / "file")]).validate(
            ToyModule(), DataLoader(torch.zeros(2, 4)), verbose=False
        )


@pytest.mark.slow
def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    module = GPTLightningModule(tiny_config())
    module.configure_model()
    next(iter(module.model.decoder.layers.values())).compile()
    with pytest.raises(ConfigError, match="Leave compile out of the strategy"):
        trainer(callbacks=[LayerStatistics(tmp_path / "file")]).validate(
            module, DataLoader(_rows(0), batch_size=4), verbose=False
        )
