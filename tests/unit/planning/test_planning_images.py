"""Plans of models with a tower of images: sizes of text and tower, and the tower's bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from safetensors import safe_open

from megatron_lightning.errors import ConfigError
from megatron_lightning.models import num_parameters
from megatron_lightning.planning.ledger.tower_memory import TowerLinear, TowerSizes
from megatron_lightning.planning.search import layout_search
from megatron_lightning.recipe_reading.image_models import image_model
from megatron_lightning.recipe_reading.plan_command import plan
from tests.helpers.gpt_folders import make_folder
from tests.helpers.image_folders import USUAL, make_image_folder

PATCHES = {"llava": 1, "qwen2_5_vl": 4, "gemma3": 4, "idefics3": 4}
"""Patches of a tower that become a token."""


@cache
def _folder(family: str) -> Path:
    return make_image_folder(family, Path(mkdtemp(prefix="planned-")))


@pytest.mark.parametrize("family", USUAL)
def test_text_and_tower_have_all_parameters_of_the_folder(family: str) -> None:
    found = image_model(str(_folder(family)))
    assert found is not None
    config, tower = found
    with safe_open(_folder(family) / "model.safetensors", "pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    total = sum(_product(shape) for shape in sizes)
    assert num_parameters(config) + tower.parameters == total
    assert tower.trained == tower.parameters
    assert tower.patches_per_token == PATCHES[family]


def _product(shape: list[int]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def _planned(path: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    from json import loads

    model = "model.class_path=megatron_lightning.modules.HuggingFaceModule"
    own = [model, f"model.init_args.path={path}", "data.sequence_length=64", "data.batch_size=4"]
    strategy = "trainer.strategy.class_path=megatron_lightning.strategies.MegatronStrategy"
    size = ["trainer.devices=2", "trainer.precision=bf16-true", strategy]
    text, _ = plan(config=[], overrides=[*own, *size, *overrides], json=True, **options)
    found: dict[str, Any] = loads(text)
    return found


def test_the_tower_is_on_the_first_stage() -> None:
    pipeline = "trainer.strategy.init_args.pipeline_model_parallel_size=2"
    path = _folder("qwen2_5_vl")
    small, large = (_planned(path, pipeline, image_tokens=number) for number in (1, 48))
    assert small["errors"] == [] and large["images"] == {"tokens": 48, "patches": 192}
    assert large["stages"][0]["other_units"][0] == "tower"
    with_tower, without = (small["stages"][stage]["pp_rank"] for stage in (0, 1))
    sizes = [
        [one["bytes"]["pp_ranks"][rank]["activations"] for one in (small, large)]
        for rank in (with_tower, without)
    ]
    assert sizes[0][1] > sizes[0][0] and sizes[1][1] == sizes[1][0]
    assert _planned(path, pipeline)["images"]["tokens"] == 64  # all tokens of a sample


def test_a_frozen_tower_has_weights_alone() -> None:
    path = _folder("llava")
    own = image_model(str(path))
    assert own is not None
    trained, projector, frozen, adapted = (
        _planned(path, *options, image_tokens=32)["bytes"]["fullest_rank"]
        for options in (
            (),
            ("model.init_args.freeze=[model.vision_tower]",),
            ("model.init_args.freeze=[model.vision_tower, model.multi_modal_projector]",),
            ("model.init_args.peft={r: 2, exclude_modules: ['**.vision_tower.**']}",),
        )
    )
    size = own[1].parameters
    assert frozen["weights"] == trained["weights"]
    assert trained["gradients"] - frozen["gradients"] == 4 * size
    assert trained["optimizer"] - frozen["optimizer"] == 12 * size // 2  # zero1 on two ranks
    assert trained["activations"] > projector["activations"] > frozen["activations"]
    assert adapted["gradients"] < 4 * size


def test_layers_before_the_first_trained_one_cost_a_third() -> None:
    linears = [
        TowerLinear("vision.a", 10, 99, is_in_block=True),
        TowerLinear("vision.b", 10, 1, is_in_block=True),
        TowerLinear("projector", 10, 100, is_in_block=False),
    ]
    for trained, work in (("111", 10_000), ("001", 5_000 / 3 + 5_000), ("000", 10_000 / 3),
                          ("100", 4_950 + 5_050 * 2 / 3)):  # fmt: skip
        own = (
            one._replace(is_trained=mark == "1") for one, mark in zip(linears, trained, strict=True)
        )
        tower = TowerSizes(
            parameters=2000, trained=10, linears=tuple(own), patches_per_token=1.0, image_tokens=5
        )
        assert tower.trained_work(None) == pytest.approx(work), trained
    flops = [
        _planned(_folder("llava"), *options, image_tokens=32)["flops"]
        for options in ((), ("model.init_args.freeze=[model.vision_tower]",))
    ]
    assert flops[0] != flops[1]


def test_a_search_keeps_the_ranks_that_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit refuses chats with images where others are tried."""
    monkeypatch.setattr(layout_search, "_LEAST_TOKENS", 16)
    found = _planned(_folder("llava"), search=True, device="h100", image_tokens=9)
    layouts = found["search"]["layouts"]
    assert layouts and {one["context_parallel_size"] for one in layouts} == {1}


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    for number in (-1, 65):
        (error,) = _planned(_folder("llava"), image_tokens=number)["errors"]
        assert f"--image-tokens is {number}, and a sample has 64 tokens" in error
    assert _planned(_folder("llava"), image_tokens=0)["images"]["tokens"] == 0
    assert (
        "reads no images" in _planned(make_folder("llama", tmp_path), image_tokens=3)["errors"][0]
    )
    with pytest.raises(ConfigError, match="the weights of no family of GPTModel"):
        image_model(str(make_image_folder("mllama", tmp_path)))
