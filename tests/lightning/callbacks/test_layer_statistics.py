"""LayerStatistics: sums over tokens are equal on every layout, and padding is in none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.bridge import commands
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.callbacks import LayerStatistics
from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.gpt_folders import make_folder
from tests.helpers.layouts import LAYOUTS, Layout, make_layout, tiny_config, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer

TOLERANCE = 1e-6
PADDED = 6
LINEAR = tuple(f"decoder.layers.0.{n}" for n in ("self_attention.linear_proj", "mlp.linear_fc2"))


def _rows(padded: int) -> list[dict[str, Any]]:
    rows = token_rows(8, 16, 64)
    for row in rows:
        row["padding"] = torch.arange(16) >= 16 - padded
        if padded:
            row["labels"] = row["labels"].masked_fill(row["padding"], -100)
            row["tokens"] = row["tokens"].masked_fill(row["padding"], 9)
    return rows


def _packed() -> list[dict[str, Any]]:
    """Two texts a row."""
    pairs = list(zip(*[iter(_rows(0))] * 2, strict=True))
    places = torch.arange(32)
    marks = {"position_ids": places % 16, "document_ids": places // 16}
    return [
        {name: torch.cat([a[name], b[name]]) for name in ("tokens", "labels")} | marks
        for a, b in pairs
    ]


def _validate(
    layout: Layout, path: str, padded: int = PADDED, cut: bool = False, packed: bool = False
) -> None:
    pl.seed_everything(1, verbose=False)
    moe = MoEConfig(num_experts=4, router_topk=2, layer_freq=(0, 1))
    module = GPTLightningModule(tiny_config(num_query_groups=2, activation="swiglu", moe=moe))
    rows = _rows(padded)
    if cut:
        rows = [{name: x[: 16 - PADDED] for name, x in row.items()} for row in rows]
    rows = _packed() if packed else rows
    loader = DataLoader(rows, batch_size=4 // layout.data)
    run = trainer(layout.strategy(), callbacks=[LayerStatistics(path, second_moments=True)])
    run.validate(module, loader, verbose=False)


def _differences(first: Path, second: Path) -> dict[str, float]:
    own, other = Statistics.load(first), Statistics.load(second)
    assert own.model == other.model
    assert own.model is not None
    a, b = ({**x.entries, **{k: x.moments(k) for k in LINEAR}} for x in (own, other))
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
    _validate(LAYOUTS["single"], str(tmp_path / "packed"), packed=True)
    found = _differences(tmp_path / "full", tmp_path / "packed")
    assert max(found.values()) < TOLERANCE, found


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    folders = [make_folder("llama", tmp_path / name, **sizes) for name in ("first", "second")]
    for file in folders[1].glob("*.safetensors"):
        tensors = load_file(file)
        changed = {n: 2 * x if "layers.0.mlp.up_proj" in n else x for n, x in tensors.items()}
        save_file(changed, file, metadata={"format": "pt"})
    path = str(tmp_path / "file")
    rows = DataLoader(token_rows(4, 16, 67), batch_size=4)
    run = trainer(callbacks=[LayerStatistics(path)])
    run.validate(GPTLightningModule(init_from_hf=str(folders[0])), rows, verbose=False)
    options: dict[str, Any] = {"quantize": "int8", "kv_cache": "fp8", "statistics": path}
    commands.export(str(folders[0]), str(tmp_path / "served"), **options)
    with pytest.raises(CheckpointError, match=r"blocks have the digest gpt:.*are others"):
        commands.export(str(folders[1]), str(tmp_path / "x"), **options)
    commands.prune(str(folders[0]), str(tmp_path / "fewer"), drop_layers=[1])
    with pytest.raises(CheckpointError, match=r"those of .*fewer have gpt:.*are others"):
        commands.export(str(tmp_path / "fewer"), str(tmp_path / "x"), **options)
    with pytest.raises(CheckpointError, match=r"second\S* have gpt:.*are others"):
        commands.prune(
            str(folders[1]), str(tmp_path / "x"), statistics=path, ffn_hidden_size=16
        )  # fmt: skip


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no blocks decoder\.layers\.N"):
        trainer(callbacks=[LayerStatistics(tmp_path / "file")]).validate(
            ToyModule(), DataLoader(torch.zeros(2, 4)), verbose=False
        )


def test_weights_that_no_folder_has_are_refused(tmp_path: Path) -> None:
    module = GPTLightningModule(tiny_config())
    module.configure_model()
    layer: Any = module.model.get_submodule("decoder.layers.0.self_attention.linear_proj")
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match="adapters or weights as quantized data"):
        trainer(callbacks=[LayerStatistics(tmp_path / "file")]).validate(
            module, DataLoader(_rows(0), batch_size=4), verbose=False
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
