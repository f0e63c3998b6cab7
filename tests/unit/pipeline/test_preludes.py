"""Which modules outside of the units the first stage holds, and why others stay on every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.assembly.partition import Stages, find_stages
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.stages.preludes import PreludeCalls, name_of, position_of
from megatron_lightning.strategies import MegatronStrategy
from tests.lightning.training.test_preludes import WIDTH, Block, Leaky, Model, Step, Tied, Twice

UNITS = ["model.embed", "model.blocks.*", "model.head"]
IMAGES = {"x": torch.zeros(2, 3), "images": torch.zeros(2, 3)}


def _root(kind: type[Model], example: Any = None) -> Step:
    class Root(Step):
        def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
            return self.model(x, images)

    root = Root(kind)
    root.example_input_array = example or {"x": torch.zeros(2, 3)}
    return root


def _stages(kind: type[Model], example: Any = None, pp: int = 2, **options: Any) -> Stages:
    given = PipelineOptions(units=UNITS, **options)
    return find_stages(_root(kind, example), Placement.loop(pp), given)


class Behind(Model):
    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if images is None else hidden + self.tower(images))


class Encodes(Model):
    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        hidden: Tensor = self.embed(x)
        return hidden if images is None else hidden + self.tower.encode(images)


class Inside(Model):
    """The forward calls the layers of the tower, and not the tower."""

    def begin(self, x: Tensor, images: Tensor | None) -> Tensor:
        hidden: Tensor = self.embed(x)
        if images is not None:
            hidden = hidden + self.tower.second(self.tower.first(images))
        return hidden


class Registered(Model):
    def __init__(self) -> None:
        super().__init__()
        tower = self.tower
        del self.tower
        self.tower = tower


class Table(Model):
    """Every block reads the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden, positions = self.embed(x), self.tower(torch.arange(2))
        for block in self.blocks:
            hidden = block(hidden, positions)
        return self.head(hidden)


@pytest.mark.parametrize(
    ("kind", "example", "preludes"),
    [
        (Model, None, ("tower",)),
        (Model, IMAGES, ("tower",)),
        (Twice, IMAGES, ("tower",)),
        (Inside, IMAGES, ("tower.first", "tower.second")),
        (Registered, IMAGES, ("tower",)),
        (Encodes, IMAGES, ("tower",)),
    ],
)
def test_modules_called_before_the_first_stage_ends(
    kind: type[Model], example: Any, preludes: tuple[str, ...]
) -> None:
    found = _stages(kind, example)
    assert found.outside.preludes == preludes
    assert not found.outside.replicated and not found.replicated_over_pp


@pytest.mark.parametrize(
    ("kind", "example", "reason"),
    [
        (Behind, IMAGES, "called behind the first stage"),
        (Leaky, IMAGES, "hands on state by a list"),
        (Registered, None, "registered behind units"),
        (Encodes, None, "Encodes does not call it"),
        (Inside, None, "Inside does not call it"),
        (Table, None, "units of later stages read what it looks up"),
    ],
)
def test_other_modules_stay_on_every_stage(kind: type[Model], example: Any, reason: str) -> None:
    found = _stages(kind, example)
    assert found.outside.preludes == ()
    assert reason in found.outside.replicated["tower"]


def test_patterns_keep_modules_on_every_stage() -> None:
    found = _stages(Model, replicated_modules=["tower"])
    assert found.outside.replicated == {"tower": "replicated_modules names it"}
    for pattern in ("towers", "blocks.0"):
        with pytest.raises(ConfigError, match=rf"'{pattern}' in replicated_modules .* matches no"):
            _stages(Model, replicated_modules=[pattern])


def test_without_an_example_nothing_moves() -> None:
    root = Step(Model)
    root.example_input_array = None
    found = find_stages(root, Placement.loop(2), PipelineOptions(units=UNITS))
    assert found.outside.replicated == {"tower": "no example inputs show where it is called"}


def test_weights_shared_with_units_of_several_stages_are_replicated() -> None:
    names = {"tower.second.weight", "blocks.1.linear.weight", "blocks.2.linear.weight"}
    assert _stages(Tied, pp=4).replicated_over_pp == names


class Heavy(Model):
    """The tower has as many parameters as two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3, WIDTH), Block(), Block())


def _layers(found: Stages) -> list[int]:
    return [sum("blocks" in unit for unit in units) for units in found.units]


def test_the_cost_of_a_tower_is_part_of_the_first_stage() -> None:
    assert _layers(_stages(Heavy)) == [1, 3]
    assert _layers(_stages(Heavy, pp=3)) == [0, 2, 2]
    assert _stages(Heavy, pp=3).describe_imbalance() is None
    assert _layers(_stages(Heavy, replicated_modules=["tower"])) == [2, 2]
    root = _root(Heavy)
    root.model.tower.requires_grad_(False)  # a third of the operations of a training step
    found = find_stages(root, Placement.loop(2), PipelineOptions(units=UNITS))
    assert _layers(found) == [2, 2]
    assert found.costs[1] > found.costs[0]  # the last stage is on rank 0


def test_a_description_names_the_stage_or_the_reason() -> None:
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2, pipeline_options=PipelineOptions(units=UNITS)
    )
    text = strategy.describe(_root(Model))
    row = next(line for line in text.splitlines() if line.startswith("model.tower.first"))
    assert row.split()[1] == "0"
    *_, last = strategy.describe(_root(Registered)).splitlines()
    assert last.startswith("model.tower is on every stage: the example inputs do not reach it")


def test_calls_have_negative_indices() -> None:
    calls = PreludeCalls(2)
    assert [calls.next(position) for position in (0, 1, 0)] == [-1, -2, -3]
    calls.enter()
    assert calls.next(1) == -4 and calls.made() == {-1, -2, -3, -4}
    assert calls.restarted().made() == {-1, -2, -3} and calls.restarted().next(1) == -4
    assert [position_of(index, 2) for index in (-1, -2, -3, -4)] == [0, 1, 0, 1]
    assert [name_of(i, ["u"], ["a", "b"]) for i in (0, -1, -4)] == ["u", "a", "b"]
