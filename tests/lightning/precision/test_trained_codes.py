"""Folders with the codes of a training by ``MegatronFP8Precision``, as its checkpoint describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.shards.spec import Box, ShardSpec
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.quantization import dequantize, quantize
from megatron_lightning.precision.served.trained_layers import _is_cut, read_recipes
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.gpt_folders import make_folder
from tests.helpers.layouts import Layout, make_layout, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
DOWN = FP8Recipe(scaling="rowwise")
ROWS = FP8Recipe(
    scaling="nvfp4",
    weight_2d_scaling=False,
    modules={"**.linear_fc2": DOWN, "**.self_attention.*": "bf16"},
)


def _fit(layout: Layout, folder: str, path: str, recipe: FP8Recipe = ROWS) -> None:
    torch.manual_seed(0)
    module = GPTLightningModule(init_from_hf=folder, learning_rate=1e-3)
    precision: Any = MegatronFP8Precision(recipe)
    strategy = layout.strategy() if layout.ranks > 1 else MegatronStrategy()
    run = trainer(strategy, max_steps=1, plugins=[precision])
    run.fit(module, DataLoader(token_rows(4, 16, 67), batch_size=4))
    run.save_checkpoint(path)


def test_a_checkpoint_says_which_codes_its_layers_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path, out = make_folder("llama", tmp_path, **SIZES), str(tmp_path / "c"), tmp_path / "o"
    _fit(make_layout("one", 1), str(folder), path)
    commands.export(path, str(out), scales="trained")
    assert "Codes are those of the training.\n" in capsys.readouterr().out
    commands.export(path, str(tmp_path / "plain"), dtype="float32")
    plain = AutoBridge.from_hf_pretrained(tmp_path / "plain").folder.tensors
    ours = AutoBridge.from_hf_pretrained(out).folder.tensors
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert "model.layers.0.self_attn.q_proj" in settings["ignore"]
    for names, recipe in ((("down",), DOWN), (("gate", "up"), ROWS)):
        weights = [f"model.layers.1.mlp.{name}_proj.weight" for name in names]
        value = torch.cat([plain[weight].read().bfloat16() for weight in weights])
        expected = dequantize(*quantize(value, recipe, "weight"), recipe, "weight")
        own = torch.cat([ours[weight].read().float() for weight in weights])
        torch.testing.assert_close(own, expected, rtol=2**-8, atol=0.0)
    with pytest.raises(ConfigError, match=r"scaling=rowwise. Set quantize to fp8_channel"):
        commands.export(path, str(tmp_path / "x"), quantize="nvfp4", scales="trained")
    state = open_checkpoint(path).state()
    state["MegatronFP8Precision"]["layers"]["model.model.layers.0.mlp.up_proj"] = {}
    with pytest.raises(CheckpointError, match="what it says of FP8 is damaged"):
        read_recipes(state, "model")


def test_scales_of_parts_are_no_scales_of_the_matrix() -> None:
    def spec(*box: Box) -> ShardSpec:
        return ShardSpec((64, 64), box)

    rows, columns = Box((0, 0), (32, 64)), Box((0, 32), (64, 32))
    rowwise, blocks = FP8Recipe(scaling="rowwise"), FP8Recipe(scaling="nvfp4")
    assert _is_cut(spec(columns), rowwise)
    assert not _is_cut(spec(rows), rowwise)
    assert not _is_cut(spec(columns), blocks)
    assert _is_cut(spec(Box((0, 0), (24, 64))), blocks)
    assert not _is_cut(spec(Box((0, 0), (24, 64))), FP8Recipe(scaling="current"))


@pytest.mark.slow
def test_ranks_describe_all_layers(tmp_path: Path) -> None:
    folder, paths = make_folder("llama", tmp_path, **SIZES), [str(tmp_path / n) for n in ("a", "b")]
    one, ranks = make_layout("one", 1), make_layout("tp2-pp2", 4, tp=2, pp=2)
    recipe = FP8Recipe(scaling="rowwise")
    _fit(one, str(folder), paths[0], recipe)
    run_ranks(ranks.ranks, _fit, ranks, str(folder), paths[1], recipe)
    found = [read_recipes(open_checkpoint(path).state(), "model") for path in paths]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 8
    cut = {path.rpartition(".")[2] for path, layer in found[1].items() if layer.is_cut}
    assert cut == {"linear_proj", "linear_fc2"}
    with pytest.raises(ConfigError, match=r"scales of their own for their parts of"):
        commands.export(paths[1], str(tmp_path / "x"), scales="trained")
