"""Units are named, listed, planned or found; a run on example inputs says what is called and what
reaches what."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.assembly.partition import find_stages
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import unit_names
from megatron_lightning.pipeline.stages.dependencies import EPILOGUE
from megatron_lightning.pipeline.stages.dependency_run import ExampleRun, check_boundaries
from megatron_lightning.pipeline.stages.units import find_pipelined
from tests.helpers import families, hf_models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


class NanoGPT(nn.Module):
    """A ModuleDict that is never called, registered in another order than it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "ln_f": nn.LayerNorm(4),
                "wte": nn.Embedding(11, 4),
                "wpe": nn.Embedding(8, 4),
                "h": nn.ModuleList(Block() for _ in range(4)),
            }
        )
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        hidden = self.transformer.wte(ids) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            hidden = block(hidden)
        return self.lm_head(self.transformer.ln_f(hidden))


class Root(nn.Module):
    """Stands for a LightningModule."""

    forward: Any = nn.Module.forward

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        super().__init__()
        self.model = model
        self.example_input_array = example


CALLED = ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(4))]
CALLED += ["transformer.ln_f", "lm_head"]
IDS = torch.zeros(2, 3, dtype=torch.long)


def test_units_are_found_in_the_order_of_the_calls() -> None:
    root = Root(NanoGPT(), IDS)
    found = find_pipelined(root, calls_of=ExampleRun(root).calls)
    assert found.path == "model" and list(unit_names(found.units)) == CALLED
    assert [weight for _, weight in found.units] == [0, 0, 1, 1, 1, 1, 0, 0]


def test_without_inputs_units_are_in_the_order_of_registration() -> None:
    root = Root(NanoGPT())
    found = find_pipelined(root, calls_of=ExampleRun(root).calls)
    assert set(unit_names(found.units)) == set(CALLED) and found.units[0][0] == "lm_head"


@pytest.mark.parametrize("prefix", ["", "model."])
def test_units_are_named_by_patterns(prefix: str) -> None:
    names = ["transformer.wte", "transformer.wpe", "transformer.h.*", "transformer.ln_f", "lm_head"]
    found = find_pipelined(Root(NanoGPT()), [prefix + name for name in names])
    assert found.path == "model" and list(found.units) == CALLED
    with pytest.raises(ConfigError, match=r"'transformer\.x' in units .* matches no module"):
        find_pipelined(Root(NanoGPT()), ["transformer.x"])


def test_units_are_those_of_the_module_whose_call_holds_them_all() -> None:
    found = find_pipelined(Root(NanoGPT()), ["h.*"])
    assert found.path == "model" and found.units[0] == "transformer.h.0"
    sequential = find_pipelined(Root(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))
    assert sequential.path == "model" and [name for name, _ in sequential.units] == ["0", "2"]


class Called(NanoGPT):
    _pp_plan = {"transformer.wte": (), "transformer.h": (), "lm_head": ()}  # noqa: RUF012


def test_a_plan_of_the_model_is_used_where_it_lists_layers() -> None:
    root = Root(Called(), IDS)
    found = find_pipelined(root, calls_of=ExampleRun(root).calls)
    assert unit_names(found.units) == ("transformer.wte", *CALLED[2:6], "lm_head")
    root.model._pp_plan = {"lm_head": ()}
    assert list(unit_names(find_pipelined(root, (), ExampleRun(root).calls).units)) == CALLED


def test_a_model_without_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Root has no list of modules .* PipelineOptions"):
        find_pipelined(Root(nn.Linear(2, 2)))


# -------------------------------------------------------------------------------------------- uses


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(one)
        return self.third(two + one * 2)


class Side(Chain):
    """Hands a tensor from unit to unit in a list."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        self.first.register_forward_hook(lambda *given: seen.append(given[1][0] * 2))
        hidden = self.second(self.first(x))
        return self.third(hidden) + seen[0]


class Functional(Chain):
    """Reads a weight of the first unit behind the last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.first.linear.weight


UNITS = ["first", "second", "third"]


def _uses(model: nn.Module) -> Any:
    return ExampleRun(Root(model, torch.ones(2, 4))).uses("model", UNITS)


def test_outputs_that_bypass_a_unit_are_carried() -> None:
    uses = _uses(Chain())
    assert uses.outputs == {(0, 1), (1, 2), (0, 2), (2, EPILOGUE)}
    assert uses.carried(2) == (0, 1) and uses.carried(1) == (0,) and not uses.side_channels


def test_state_that_travels_by_a_list_forbids_boundaries() -> None:
    class Leaky(Chain):
        def forward(self, x: Tensor) -> Tensor:
            store: list[Tensor] = []

            def first(x: Tensor) -> Tensor:
                store.append(x * 3)
                return x + 1

            def third(x: Tensor) -> Tensor:
                return x + store[0]

            self.first.forward, self.third.forward = first, third
            return self.third(self.second(self.first(x)))

    uses = _uses(Leaky())
    assert uses.side_channels == {(0, 2)} and not uses.allows(1) and not uses.allows(2)
    root = Root(Leaky(), torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"unit 'first' hands state to 'third' by .* cannot be"):
        find_stages(root, Placement.loop(2), PipelineOptions(units=UNITS))


def test_parameters_read_elsewhere_stay_on_every_rank() -> None:
    assert _uses(Functional()).read_between == {"first.linear.weight"}
    root = Root(Functional(), torch.ones(2, 4))
    stages = find_stages(root, Placement.loop(2), PipelineOptions(units=UNITS))
    assert stages.replicated_over_pp == {"first.linear.weight"}


def test_ties_lie_at_the_ends_or_everywhere() -> None:
    options = PipelineOptions(units=CALLED)
    assert (
        find_stages(Root(NanoGPT()), Placement.loop(2), options).replicated_over_pp == frozenset()
    )
    model = NanoGPT()
    model.transformer.h[1].linear.weight = model.transformer.h[2].linear.weight
    tied = find_stages(Root(model), Placement.loop(4), options).replicated_over_pp
    assert tied == {"transformer.h.1.linear.weight", "transformer.h.2.linear.weight"}


def test_the_run_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert ExampleRun(Root(model, torch.ones(2, 4))).calls("model") is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_that_branches_on_values_runs_for_real() -> None:
    class Branching(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if x.sum().item() > 0 else x)

    assert _uses(Branching()).carried(2) == (0, 1)
    with torch.device("meta"):
        model = Branching()
    assert _uses(model) is None


def test_a_unit_that_writes_into_what_others_use_is_refused() -> None:
    class Writes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            one = self.first(x)
            self.second.forward = lambda x: x.relu_() * 2
            return self.third(self.second(one) + one)

    uses = _uses(Writes())
    assert uses.writes == {(0, 1)}
    with pytest.raises(ConfigError, match=r"unit 'second' writes into the output of unit 'first'"):
        check_boundaries(uses, UNITS, [0, 2])
    check_boundaries(uses, UNITS, [0, 1])


def test_units_without_a_module_are_refused() -> None:
    class Scaled(nn.Linear):
        def pipeline_units(self) -> list[str]:
            return ["weight", "bias"]

    with pytest.raises(ConfigError, match=r"pipeline_units\(\) of Scaled names no module"):
        find_pipelined(nn.Sequential(Scaled(2, 2)))


def _partition(model: nn.Module, pp: int, example: Any = None) -> Any:
    return find_stages(Root(model, example), Placement.loop(pp), PipelineOptions())


def _layers(stages: Any) -> list[int]:
    """Return the blocks of lists of every stage."""
    return [sum(name.rpartition(".")[2].isdigit() for name in units) for units in stages.units]


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["t5-untied", "t5", "bart"])
def test_two_stacks_are_divided_together(name: str) -> None:
    model = hf_models.MODELS[name]() if name in hf_models.MODELS else families.OWN[name]()
    assert _layers(_partition(model, 4)) == [2, 2, 2, 2]
    assert _layers(_partition(model, 2)) == [4, 4]
    assert _partition(model, 4).describe_imbalance() is None


def test_blocks_of_unequal_cost_are_divided_by_cost() -> None:
    model = families.Pyramid()
    by_count = [["stages.0", "stages.1"], ["stages.2", "stages.3", "head"]]
    for example in (None, torch.randn(2, 8)):
        stages = _partition(model, 2, example)
        units = [list(units) for units in stages.units]
        assert units == [["stages.0", "stages.1", "stages.2"], ["stages.3", "head"]] != by_count
    four = _partition(model, 4)
    assert four.describe_imbalance() is not None
    assert "pipeline rank 0 of 4 has 7" in four.describe_imbalance()


class Scanned(nn.Module):
    """Convolutions of growing width over shrinking images: equal work, unequal parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 8, 16, 32, 64)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_operations_count_beside_parameters() -> None:
    by_size, by_both = (
        _partition(Scanned(), 2, example) for example in (None, torch.randn(1, 4, 32, 32))
    )
    assert _layers(by_size) == [3, 1]
    assert by_both.costs[0] == pytest.approx(0.5, abs=0.15)
    operations = ExampleRun(Root(Scanned(), torch.randn(1, 4, 32, 32))).operations("model")
    assert operations is not None
    counts = [operations[f"layers.{index}"] for index in range(4)]
    assert counts == [2 * 9 * 4 * 8 * 16**2, 2 * 9 * 8 * 16 * 8**2, 2 * 9 * 16 * 32 * 4**2,
                      2 * 9 * 32 * 64 * 2**2]  # fmt: skip
