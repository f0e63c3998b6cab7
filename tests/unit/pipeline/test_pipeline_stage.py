"""A rank's part of a module: units of other ranks stay in their places, without tensors."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.errors import ConfigError, PipelineError, ShardingError
from megatron_lightning.layers.state.recompute import apply_recompute
from megatron_lightning.parallel.shards.other_stages import is_absent, present_modules
from megatron_lightning.pipeline.stages.stage import StagePartition, has_unit


class Model(nn.Module):
    """Units in a ModuleList, a Sequential and as attributes, beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.tail = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.tail(hidden)


STAGES = (("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "tail.0", "tail.1"))


def _second() -> Model:
    model = Model()
    StagePartition(model, STAGES, [1])
    return model


def test_each_rank_has_its_units_and_what_is_outside() -> None:
    first, second = Model(), _second()
    partition = StagePartition(first, STAGES, [0])
    assert partition.bounds == ((0, 3), (3, 7)) and partition.units[3] == "layers.2"
    outside = {"positions"}
    names = [{name for name, _ in model.named_parameters()} for model in (first, second)]
    assert names[0] & names[1] == outside
    assert names[0] | names[1] == {name for name, _ in Model().named_parameters()}
    assert [name for name, _ in first.named_buffers()] == []
    assert "tail.0.running_mean" in second.state_dict()


def test_an_index_means_the_same_layer_on_every_stage() -> None:
    model = _second()
    assert len(model.layers) == 4 and len(model.layers[1:3]) == 2
    assert [has_unit(model, f"layers.{i}") for i in range(4)] == [False, False, True, True]
    assert list(model.layers[:2].parameters()) == [] and is_absent(model.layers[-4])
    assert model.layers[0].weight.shape == (4, 4) and model.layers[0].weight.dtype == torch.float32
    assert [path for path, _ in present_modules(model.layers)] == ["", "2", "3"]
    with pytest.raises(ShardingError, match=r"layers\.0\.weight belongs to a unit on another"):
        torch.ones(1, 4) @ model.layers[0].weight  # torch would give uninitialized memory
    with pytest.raises(PipelineError, match=r"layers\.0 was called outside of the pipelined"):
        model.layers[0](torch.ones(1, 4))


def test_what_is_left_keeps_its_names_and_can_be_copied() -> None:
    model = _second()
    assert list(model.state_dict())[:2] == ["positions", "layers.2.weight"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_absent(other.layers[0]) and not is_absent(other.layers[2])
        assert list(other.state_dict()) == list(model.state_dict())


def test_parameters_that_all_ranks_keep_stay_in_absent_units() -> None:
    model = Model()
    StagePartition(model, STAGES, [1], ["embed.weight"])
    assert "embed.weight" in model.state_dict() and "embed.bias" not in model.state_dict()


def test_tied_parameters_stay_with_each_unit() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model.head.weight = model.embed.weight
    StagePartition(model, [["embed"], ["head"]], [1])
    assert [name for name, _ in model.named_parameters()] == ["head.weight"]


def test_units_stay_absent_when_their_forward_is_wrapped() -> None:
    model = _second()
    options = RecomputeOptions(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    apply_recompute(model, options)
    assert is_absent(model.layers[0]) and not has_unit(model, "layers.1")


def test_a_part_is_divided_once() -> None:
    model = _second()
    partition = StagePartition(model, STAGES, [1], has_all_units=False)
    assert partition.module is model and has_unit(model, "layers.2")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["embed", "head"], "'head' is listed as a pipeline unit, and Model has no such"),
        (["embed", "layers", "layers.0"], r"'layers' contains unit 'layers\.0'"),
        (["embed", "positions"], "'positions' is listed .* no such submodule"),
    ],
)
def test_units_that_do_not_fit_are_named(units: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StagePartition(Model(), [units], [0])


def test_a_model_that_is_compiled_as_one_is_refused() -> None:
    model = Model()
    model.tail.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"tail is compiled as one.*Compile each unit"):
        StagePartition(model, STAGES, [0])
    whole = nn.ModuleDict({"net": torch.compile(Model(), backend="eager")})
    with pytest.raises(ConfigError, match=r"net is compiled as one"):
        StagePartition(whole, [["net._orig_mod.embed"], ["net._orig_mod.tail"]], [0])
