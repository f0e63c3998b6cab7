"""The part of a checkpoint that is no tensors, and plain Lightning checkpoints."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.checkpoint.format.naming import (
    join_tensors,
    name_optimizer_state,
    number_optimizer_state,
    split_tensors,
)
from megatron_lightning.checkpoint.format.plain_state import dump_state, load_state
from megatron_lightning.errors import CheckpointError
from tests.helpers.checkpoints import save_tensors


class _Colour(Enum):
    RED = "red"


class _Text(str):
    pass


@dataclass(frozen=True)
class _Config:
    width: int
    path: Path


def test_state_becomes_plain() -> None:
    base = torch.arange(1000.0)
    state = {
        "atoms": [
            None,
            True,
            3,
            2.5,
            1j,
            "x",
            b"y",
            torch.float16,
            torch.device("cpu"),
            torch.Size([2]),
        ],
        "converted": [
            Path("a/b"),
            _Colour.RED,
            np.float64(1.5),
            np.int32(4),
            np.arange(3),
            _Text("t"),
        ],
        "mappings": [
            SimpleNamespace(a=1),
            _Config(3, Path("p")),
            defaultdict(list, {"k": [1]}),
            OrderedDict(a=1),
            Counter([5]),
        ],
        "rest": [(1, 2), {1, 2}, frozenset([3])],
        "tensor": nn.Parameter(base[:2]),
    }
    data = dump_state(state)
    assert len(data) < 5000  # the view's 4000-byte storage is not dragged along
    loaded = load_state(data, "test")
    assert loaded["atoms"] == state["atoms"]
    assert loaded["converted"][:4] == ["a/b", "red", 1.5, 4] and torch.equal(
        loaded["converted"][4], torch.arange(3)
    )
    assert [type(v) for v in loaded["converted"]] == [str, str, float, int, Tensor, str]
    assert loaded["mappings"] == [
        {"a": 1},
        {"width": 3, "path": "p"},
        {"k": [1]},
        OrderedDict(a=1),
        Counter([5]),
    ]
    assert [type(v) for v in loaded["mappings"]] == [dict, dict, dict, OrderedDict, Counter]
    assert loaded["rest"] == [(1, 2), {1, 2}, {3}]
    assert type(loaded["tensor"]) is Tensor and torch.equal(loaded["tensor"], base[:2])


@pytest.mark.parametrize(
    "value", [print, object(), int, np.array([object()]), lambda: None, range(3)]
)
def test_state_that_needs_code_is_refused_by_place(tmp_path: Path, value: object) -> None:
    state = {"callbacks": {"loss": [0, value]}}
    with pytest.raises(
        CheckpointError, match=r"checkpoint\['callbacks'\]\['loss'\]\[1\] is a .*state_dict\(\)"
    ):
        save_tensors(tmp_path / "a", state=state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [print, object(), int, lambda: None, nn.Linear(2, 2)])
def test_hyper_parameters_that_need_code_are_left_out(value: object) -> None:
    """Lightning warns of modules among them, and leaves out what cannot be pickled."""
    state = {
        "hyper_parameters": {"width": 3, "loss": [0, value]},
        "datamodule_hyper_parameters": {"transform": value},
    }
    with pytest.warns(
        UserWarning, match=r"without the hyper-parameter '(loss|transform)': checkpoint\['.*ignore="
    ):
        data = dump_state(state)
    assert load_state(data, "test") == {
        "hyper_parameters": {"width": 3},
        "datamodule_hyper_parameters": {},
    }


def test_names_divide_and_join() -> None:
    tensor = torch.ones(2)
    checkpoint = {
        "epoch": 1,
        "state_dict": {"a.b": tensor, "extra": "text"},
        "current_model_state": {"a.b": tensor},
        "callbacks": {"x": {"best": tensor}},
        "nothing": {},
        "optimizer_states": [
            {
                "state": {"a.b": {"step": 3, "exp_avg": tensor}},
                "param_groups": [{"lr": 0.1, "params": ["a.b"]}],
            },
            {"state": {}, "param_groups": [{"lr": 0.2, "params": []}]},
        ],
    }
    tensors, state = split_tensors(checkpoint)
    assert list(tensors) == [
        "state_dict.a.b",
        "current_model_state.a.b",
        "optimizer_states.0.state.a.b.exp_avg",
    ]
    assert state["optimizer_states"][0]["state"] == {"a.b": {"step": 3}}
    assert state["callbacks"] is checkpoint["callbacks"]
    assert (
        join_tensors(tensors, load_state(dump_state(state), "test"))["optimizer_states"][0][
            "state"
        ]["a.b"]["step"]
        == 3
    )
    assert join_tensors(tensors, state) == checkpoint


def test_optimizer_ids_follow_the_parameter_groups() -> None:
    numbered = {
        "state": {0: {"m": 1}, 2: {"m": 3}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
    named = name_optimizer_state(numbered, ["c", "a", "b"])
    assert named["state"] == {"c": {"m": 1}, "b": {"m": 3}}
    assert [group["params"] for group in named["param_groups"]] == [["c", "a"], ["b"]]
    assert number_optimizer_state(named) == numbered
