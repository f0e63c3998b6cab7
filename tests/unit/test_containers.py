"""Indices of lists that a pipeline has cut count what the whole model has."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.containers import AbsentUnit
from megatron_lightning.pipeline.stage import StagePartition


class _Sequential(nn.Sequential):
    def pipeline_units(self) -> list[str]:
        return list(self._modules)


class _OwnForward(_Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) + 1
        return x


class _List(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def pipeline_units(self) -> list[str]:
        return [f"layers.{i}" for i in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _layers() -> list[nn.Linear]:
    return [nn.Linear(2, 2) for _ in range(4)]


def _cut(module: nn.Module, prefix: str = "") -> Any:
    """Return the module's list on the second of two stages."""
    StagePartition(
        module, [[f"{prefix}{i}" for i in stage] for stage in ((0, 1), (2, 3))], own=(1,)
    )
    return module.get_submodule(prefix.rstrip("."))


LISTS: dict[str, Callable[[list[nn.Linear]], Any]] = {
    "sequential": lambda layers: _cut(_Sequential(*layers)),
    "own-forward": lambda layers: _cut(_OwnForward(*layers)),
    "module-list": lambda layers: _cut(_List(*layers), "layers."),
}


@pytest.mark.parametrize("kind", LISTS)
def test_an_index_means_the_same_layer_on_every_stage(kind: str) -> None:
    layers = _layers()
    left = LISTS[kind](layers)
    assert left[2] is layers[2] and left[-1] is layers[3] and left[torch.tensor(2)] is layers[2]
    assert (
        isinstance(left[0], AbsentUnit)
        and isinstance(left[-4], AbsentUnit)
        and not list(left[0].parameters())
    )
    assert list(left[:2].parameters()) == []
    assert [id(p) for p in left[1:3].parameters()] == [id(p) for p in layers[2].parameters()]
    with pytest.raises(IndexError):
        left[4]
    with pytest.raises(PipelineError, match="iterate over its ModuleList"):
        left[0](torch.ones(1, 2))


@pytest.mark.parametrize("kind", LISTS)
def test_all_are_counted_and_iteration_gives_what_is_there(kind: str) -> None:
    layers = _layers()
    left = LISTS[kind](layers)
    assert len(left) == 4 and list(left) == layers[2:]
    assert [sum(p.numel() for p in left[i].parameters()) for i in range(len(left))] == [0, 0, 6, 6]
    assert list(left.state_dict()) == ["2.weight", "2.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_a_forward_iterates_over_what_is_there(kind: Callable[..., nn.Module]) -> None:
    layers, x = _layers(), torch.ones(1, 2)
    assert torch.equal(_cut(_Sequential(*layers))(x), layers[3](layers[2](x)))
    assert torch.equal(_cut(_OwnForward(*layers))(x), layers[3](layers[2](x) + 1) + 1)
    module = _List(*layers)
    module.layers = kind(*layers) if kind is nn.Sequential else kind(layers)
    _cut(module, "layers.")
    assert torch.equal(module(x), layers[3](layers[2](x)))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_are_of_the_original_class(again: Callable[[Any], Any]) -> None:
    left, x = _cut(_Sequential(*_layers())), torch.ones(1, 2)
    copied = again(left)
    assert type(copied) is _Sequential and isinstance(left, _Sequential)
    assert torch.equal(copied(x), left(x))
