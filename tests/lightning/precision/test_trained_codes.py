"""Folders with the codes of a training by ``MegatronFP8Precision``, as its checkpoint describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.low_bit.asked import Asked, recipes_of_training
from megatron_lightning.bridge.low_bit.export import QuantizedFolder, ServedLayers, served_layers
from megatron_lightning.bridge.low_bit.schemes import Recipe, config_entry
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.shards.spec import Box, ShardSpec
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.quantization import dequantize, quantize
from megatron_lightning.precision.served.trained_layers import (
    TrainedLayer,
    _is_cut,
    read_recipes,
)
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.gpt_folders import make_folder
from tests.helpers.layouts import Layout, make_layout, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
CURRENT = FP8Recipe(scaling="current")
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
    with pytest.raises(ConfigError, match=r"scales is trained, and statistics are of a folder"):
        commands.export(path, str(out), scales="trained", kv_cache="fp8", statistics="x")
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
    gate_and_up = spec(Box((0, 0), (16, 64)), Box((32, 0), (16, 64)))
    assert not _is_cut(gate_and_up, rowwise)
    assert _is_cut(gate_and_up, FP8Recipe(scaling="blockwise"))
    assert not _is_cut(spec(columns), blocks)
    assert _is_cut(spec(Box((0, 0), (24, 64))), blocks)
    assert not _is_cut(spec(Box((0, 0), (24, 64))), FP8Recipe(scaling="current"))


def test_parts_of_a_matrix_have_the_scale_of_the_training(tmp_path: Path) -> None:
    """Servers multiply in_proj_qkvz and in_proj_ba apart, and a training as one matrix."""
    gpt = AutoBridge.from_hf_pretrained(make_folder("qwen3-next", tmp_path)).gpt_folder()
    parameters = gpt.tensors(gpt.config)
    plan = Plan(gpt.folder, parameters, gpt.pieces(gpt.config, parameters))
    tensors = plan.tensors({name: x.fill for name, x in parameters.items()})
    layers = served_layers(gpt.folder.files, tensors)._replace(owners=plan.owners)
    recipe = Recipe.of("fp8_tensor", fit="trained")._replace(trained_by=CURRENT)
    folder = QuantizedFolder(gpt.folder, dict.fromkeys(layers.quantized, recipe), layers)
    paths = [path for path in layers.quantized if "linear_attn.in_proj" in path]
    assert len(paths) > 1
    for path in paths:
        own = parameters[plan.owners[f"{path}.weight"].parameter].read()
        assert folder._shared_amax(path) == own.abs().max(), path
    folder._check_trained(paths, [torch.tensor(1.0), torch.tensor(1.001)])  # equal in bf16
    with pytest.raises(ConfigError, match=r"with a scale each \(largest weights 1, 1.1\)"):
        folder._check_trained(paths, [torch.tensor(1.0), torch.tensor(1.1)])


def test_trainings_without_a_served_form_are_refused() -> None:
    paths = [f"layers.0.self_attn.{name}_proj" for name in "qkv"]
    layers, asked = ServedLayers({}, paths), Asked(None, fit="trained")
    one = {paths[0]: TrainedLayer(CURRENT, False)}
    with pytest.raises(ConfigError, match=r"the training has .*q_proj in fp8_tensor and .*in bf16"):
        recipes_of_training(layers, one, asked)
    with pytest.raises(ConfigError, match=r"no quantized layers of this model. Set model to"):
        recipes_of_training(layers, {}, asked)
    # Recipes that differ in how codes were found are one format.
    other = FP8Recipe(scaling="current", power_of_two_scales=True)
    both = [Recipe.of("fp8_tensor", scheme="modelopt", activations="fp8_tensor")._replace(
        trained_by=recipe) for recipe in (CURRENT, other)]  # fmt: skip
    assert len(config_entry(dict(zip("ab", both, strict=True)), [])["config_groups"]) == 1


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
