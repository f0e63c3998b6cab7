"""Plans of modules without a blueprint, measured by a run without values, against real runs and
against the blueprint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor, nn

from megatron_lightning.assembly.measure import MeasuredModule
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.mistakes import Errors
from megatron_lightning.models import GPTModel
from megatron_lightning.planning import flops
from megatron_lightning.planning.measured.measured_layout import MeasuredLayout, check_measured
from megatron_lightning.planning.planned_run import MeasuredRecipe
from megatron_lightning.recipe_reading.plan_command import plan
from megatron_lightning.recipe_reading.recipe_reader import read_recipe
from tests.helpers.layouts import tiny_config

WIDTH, LENGTH, VOCABULARY = 32, 16, 64
GPT = tiny_config(num_layers=4, ffn_hidden_size=64, init_method_std=0.02)


class Mine(pl.LightningModule):
    """A user's own model."""

    def __init__(self, depth: int = 4, example: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if example:
            self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Around(pl.LightningModule):
    """A user's own module around a GPTModel."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.gpt: GPTModel | None = None

    def configure_model(self) -> None:
        self.gpt = GPTModel(GPT)


class Exampled(nn.Module):
    """A GPTModel with example inputs, to be measured as if it were unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPTModel(GPT)
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt(ids)


class Whole(nn.Module):
    """A module without units of a pipeline."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.example_input_array = torch.zeros(2, width)

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


def _measured(module: nn.Module, **options: Any) -> MeasuredModule:
    settings: dict[str, Any] = {"half": False, "plan": None, "pipeline": PipelineOptions()}
    return MeasuredModule(module, **{**settings, **options})


def test_kept_bytes_are_those_of_a_real_run() -> None:
    module, kept = Mine(), dict[int, Tensor]()
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module.train()(ids)
    real = sum(t.numel() * t.element_size() for address, t in kept.items() if address not in known)
    measured = _measured(module)
    units = measured.units.values()
    planned = sum(one.kept_stream_bytes + one.kept_inner_bytes for one in units)
    assert measured.samples == 2 and 2 * planned == real
    assert 2 * measured.outside.kept_inner_bytes == 8 * output.numel()  # the loss
    assert list(measured.units) == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert measured.units["layers.1"].stream_bytes == LENGTH * WIDTH * 4


def test_operations_and_parameters_are_those_of_the_blueprint() -> None:
    measured = _measured(Exampled())
    found = sum(one.forward_flops for one in measured.units.values())
    # Megatron's number has half of the pairs of a causal sequence, the counter all.
    pairs = 4 * LENGTH * LENGTH * GPT.hidden_size * GPT.num_layers
    expected = flops(GPT, batch_size=1, sequence_length=LENGTH) / 3
    assert expected <= found + measured.outside.forward_flops <= expected + pairs / 2
    for tp in (1, 2):
        counts, errors = measured.parameters(tp), Errors()
        assert counts is not None and not errors.found
        total = sum(counts.values())
        assert total == sum(
            p.numel() // (tp if "norm" not in name and "position" not in name else 1)
            for name, p in Exampled().named_parameters()
        )


def _file(folder: Path, model: dict[str, Any], **strategy: Any) -> str:
    sections = {
        "trainer": {
            "devices": 4,
            "precision": "32-true",
            "strategy": {
                "class_path": "megatron_lightning.strategies.MegatronStrategy",
                "init_args": strategy,
            },
        },
        "model": model,
        "data": {"class_path": "a.module.of.Mine", "init_args": {"batch_size": 8}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return str(path)


MINE = {"class_path": f"{__name__}.Mine", "init_args": {"depth": 4}}


def test_a_users_module_is_planned_and_searched(tmp_path: Path) -> None:
    path = _file(tmp_path, MINE, pipeline_model_parallel_size=2, micro_batch_size=2)
    text, is_valid = plan(config=path, json=True, device="cpu:1")
    found = json.loads(text)
    assert is_valid and found["errors"] == [] and found["grid"]["pp"] == 2
    assert [row["layers"] for row in found["stages"]] == [[0, 1], [2, 3]]
    assert [row["other_units"] for row in found["stages"]] == [["embed"], ["head"]]
    assert sum(row["parameters"] for row in found["stages"]) == sum(
        p.numel() for p in Mine().parameters()
    )
    assert found["flops"]["sample"] * 8 * 2 == found["flops"]["step"]
    text, _ = plan(config=path, device="cpu:1")
    assert "a sample" in text and "fits" in text
    text, has_layouts = plan(config=path, device="cpu:1", search=True, json=True)
    search = json.loads(text)["search"]
    assert has_layouts and search["own"]["pipeline_model_parallel_size"] == 2
    sizes = {row["pipeline_model_parallel_size"] for row in search["layouts"]}
    assert sizes and all(row["tensor_model_parallel_size"] == 1 for row in search["layouts"])
    text, has_layouts = plan(config=path, device="cpu:0.000001", search=True)
    assert not has_layouts and "fits into" in text


def test_a_module_without_units_is_planned_as_a_whole(tmp_path: Path) -> None:
    model = {"class_path": f"{__name__}.Whole"}
    found = json.loads(plan(config=_file(tmp_path, model), json=True)[0])
    assert found["errors"] == [] and found["stages"][0]["parameters"] == WIDTH * WIDTH


@pytest.mark.slow
def test_recomputation_and_tensor_parallelism_make_ranks_smaller(tmp_path: Path) -> None:
    def bytes_of(**strategy: Any) -> dict[str, float]:
        path = _file(tmp_path, MINE, micro_batch_size=8, sharding_plan="auto", **strategy)
        return dict(json.loads(plan(config=path, json=True)[0])["bytes"]["fullest_rank"])

    whole, half = bytes_of(), bytes_of(tensor_model_parallel_size=2)
    assert half["weights"] < whole["weights"] and half["activations"] < whole["activations"]
    again = bytes_of(
        recompute={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    )
    assert again["activations"] < whole["activations"] and again["weights"] == whole["weights"]


def test_a_module_around_a_gpt_model_is_planned_by_its_blueprint(tmp_path: Path) -> None:
    around = {"class_path": f"{__name__}.Around"}
    errors = Errors()
    recipe = read_recipe([_file(tmp_path, around)], [], None, errors)
    assert not errors.found and recipe is not None and recipe.model == GPT


@pytest.mark.parametrize(
    ("model", "strategy", "text"),
    [
        ({"init_args": {"example": False}}, {}, "Mine has no example inputs"),
        ({"init_args": {"width": 3}}, {}, "Mine cannot be made"),
        ({}, {"tensor_model_parallel_size": 2}, "Mine cannot be divided so"),
        ({}, {"context_parallel_size": 2}, "a plan of Mine knows tensor, pipeline and data"),
        ({}, {"sharding_plan": {"a": 1}}, "knows plans of the module itself"),
        ({}, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2,
              "micro_batch_size": 1}, "Mine cannot be divided into 8 stages"),
    ],
)  # fmt: skip
def test_what_has_no_formula_is_refused(
    model: dict[str, Any], strategy: dict[str, Any], text: str, tmp_path: Path
) -> None:
    found, is_valid = plan(config=_file(tmp_path, {**MINE, **model}, **strategy))
    assert not is_valid and text in found


@pytest.mark.slow
def test_a_model_of_transformers_has_its_own_plan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    measured = _measured(module, half=True)
    one, two = measured.parameters(1), measured.parameters(2)
    assert one is not None and two is not None
    layer = next(unit for unit in measured.units if unit.endswith("layers.1"))
    assert two[layer] == (one[layer] - 2 * 32) // 2 + 2 * 32  # all but the norms
    assert measured.stages(2, 1, PipelineOptions()) is not None


def test_memory_of_a_single_rank_is_that_of_the_state(tmp_path: Path) -> None:
    path = _file(tmp_path, MINE, data_parallel="ddp")
    recipe = read_recipe([path], ["trainer.devices=1"], None, Errors())
    assert isinstance(recipe, MeasuredRecipe)
    from megatron_lightning.pipeline.schedules import make_schedule

    stages = recipe.model.stages(1, 1, PipelineOptions())
    assert stages is not None
    table = make_schedule("auto", num_ranks=1, num_microbatches=1, num_chunks=1)
    [row] = MeasuredLayout(recipe, check_measured(recipe), stages, table).memory().ranks
    size = sum(p.numel() for p in Mine().parameters())
    assert (row.weights_bytes, row.gradients_bytes, row.optimizer_bytes) == (
        4 * size, 4 * size, 8 * size,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="no example inputs"):
        _measured(Mine(example=False))
