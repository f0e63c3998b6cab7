import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.partition import partition_units
from megatron_lightning.pipeline.stage import StagePartition, find_pipelined_module


class Body(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.extra = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.register_buffer("offset", torch.ones(4))


class Model(nn.Module):
    """Units at two depths, in a ModuleList, a ModuleDict, as attributes, and a bare parameter."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module | None = nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.randn(4))
        self.body = Body(num_layers)
        self.norm: nn.Module | None = nn.LayerNorm(4)
        self.num_layers = num_layers

    def pipeline_units(self) -> list[str]:
        layers = [f"body.layers.{index}" for index in range(self.num_layers)]
        return ["embed", "positions", *layers, "body.extra.a", "body.extra.b", "norm"]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        if self.positions is not None:
            hidden = hidden + self.positions
        for layer in (*self.body.layers, *self.body.extra.values()):
            hidden = layer(hidden) + self.body.offset
        return hidden if self.norm is None else self.norm(hidden)


def _names(module: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] or name for name, _ in module.named_parameters()}


def _stages(num_stages: int) -> tuple[tuple[str, ...], ...]:
    return partition_units(Model().pipeline_units(), num_stages)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_one_after_the_other_are_the_whole_model(num_stages: int) -> None:
    stages, whole = _stages(num_stages), Model()
    hidden = reference = torch.randn(2, 4)
    reference = whole(reference)
    seen: set[str] = set()
    for stage in range(num_stages):
        model = Model()
        view = StagePartition(model, stages, [stage]).view(stage)
        assert view is model and _names(model) == set(stages[stage]) and not seen & _names(model)
        seen |= _names(model)
        hidden = view(hidden)
    assert torch.equal(hidden, reference) and seen == set(whole.pipeline_units())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_views_of_several_stages_share_everything(num_ranks: int) -> None:
    stages = _stages(4)
    models = [Model() for _ in range(num_ranks)]
    partitions = [
        StagePartition(model, stages, range(rank, 4, num_ranks))
        for rank, model in enumerate(models)
    ]
    calls: list[int] = []
    for rank, model in enumerate(models):
        model.register_forward_hook(lambda *_, rank=rank: calls.append(rank))
        model.eval()
        model.body.layers[rank] = nn.Linear(4, 4)  # swapped after the cut, as a sharding plan does
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    hidden = torch.randn(2, 4)
    reference = Model()
    for parameter in reference.parameters():
        nn.init.constant_(parameter, 0.1)
    expected = reference(hidden)
    for stage in range(4):
        view = partitions[stage % num_ranks].view(stage)
        assert _names(view) == set(stages[stage]) and not view.training and type(view) is Model
        owned = dict(models[stage % num_ranks].named_parameters())
        assert all(parameter is owned[name] for name, parameter in view.named_parameters())
        hidden = view(hidden)
    assert torch.equal(hidden, expected) and calls == [stage % num_ranks for stage in range(4)]
    expected.sum().backward()
    hidden.sum().backward()
    grads = {
        name: parameter.grad for model in models for name, parameter in model.named_parameters()
    }
    for name, parameter in reference.named_parameters():
        assert torch.equal(grads[name], parameter.grad)


def test_what_is_left_keeps_its_names_and_can_be_copied() -> None:
    model = Model()
    partition = StagePartition(model, _stages(2), [1])
    assert (
        model.embed is None
        and model.positions is None
        and list(model.body.layers._modules) == ["2", "3"]
    )
    assert list(model.state_dict())[:2] == ["body.offset", "body.layers.2.weight"]
    assert len(list(model.body.layers)) == 2 and len(list(model.body.layers[:4])) == 2
    assert StagePartition(model, _stages(2), [1], has_all_units=False).view(1) is model
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(partition).view(1),
    ]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    hidden = torch.randn(1, 4)
    for other in copies:
        assert other is not model and torch.equal(other(hidden), model(hidden))


def test_a_compiled_container_of_two_stages_runs_the_units_of_one() -> None:
    model, stages = Model(), _stages(2)
    hidden = torch.randn(1, 4)
    expected = model(hidden)
    partition = StagePartition(model, stages, [0, 1])
    for module in (model.body, *model.body.layers):
        module.compile(backend="eager")
    assert torch.equal(partition.view(1)(partition.view(0)(hidden)), expected)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            ["embed", "positions", "body", "norm", "head"],
            "lists 'head', and Model has no such submodule",
        ),
        (
            ["embed", "positions", "body", "body.layers.0", "norm"],
            r"'body' contains unit 'body\.layers\.0'",
        ),
        (["embed", "body", "norm"], "parameter 'positions' of Model belongs to no pipeline unit"),
        (["embed", "positions", "nobody.layers.0", "body", "norm"], r"lists 'nobody\.layers\.0'"),
    ],
)
def test_units_that_do_not_fit_are_named(
    units: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "pipeline_units", lambda self: units)
    with pytest.raises(ConfigError, match=message):
        StagePartition(Model(), [units], [0])


def test_stages_must_hold_every_unit() -> None:
    with pytest.raises(ConfigError, match=r"differ in norm\. Put every unit"):
        StagePartition(Model(), [Model().pipeline_units()[:-1]], [0])


def test_tied_parameters_stay_with_each_unit() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def pipeline_units(self) -> list[str]:
            return ["embed", "head"]

    model = Tied()
    StagePartition(model, [["embed"], ["head"]], [1])
    assert [name for name, _ in model.named_parameters()] == ["head.weight"]


def test_the_pipelined_module_is_found() -> None:
    class Root(nn.Module):
        def __init__(self, **children: Any) -> None:
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)

    model = Model()
    assert find_pipelined_module(Root(model=model, other=nn.Linear(1, 1))) == ("model", model)
    with pytest.raises(
        ConfigError,
        match=r"Root has 0 \(none\).*pipeline_units\(\).*pipeline_model_parallel_size to 1",
    ):
        find_pipelined_module(Root())
    with pytest.raises(ConfigError, match=r"Root has 2 \('a', 'b'\)"):
        find_pipelined_module(Root(a=Model(), b=Model()))
