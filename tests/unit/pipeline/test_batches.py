"""Batches are cut into micro-batches, and outputs of micro-batches are put together, whatever they
are made of."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.batch.microbatches import (
    batch_size_of,
    merge_outputs,
    split_batch,
    tensors_of,
)


@dataclass(frozen=True)
class _Labels:
    values: Tensor
    weight: float = 1.0


@dataclass
class _Batch:
    images: Tensor
    labels: _Labels
    names: list[str]
    boxes: tuple[Tensor, ...] = ()
    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.number = len(self.names)


class _Kind(Enum):
    A = "a"
    B = "b"


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


def _batch() -> _Batch:
    return _Batch(
        torch.arange(4), _Labels(torch.arange(4) * 2), list("abcd"), (torch.arange(8).view(4, 2),)
    )


def test_nested_dataclasses_are_cut() -> None:
    batch = _batch()
    first, last = split_batch(batch, 3)
    assert (first.images.tolist(), last.images.tolist()) == ([0, 1, 2], [3])
    assert isinstance(last.labels, _Labels)
    assert last.labels.values.tolist() == [6]
    assert (first.names, last.names) == (["a", "b", "c"], ["d"])
    assert last.boxes[0].tolist() == [[6, 7]]
    assert last.number == 4, "fields that are not tensors stay"
    assert batch.images.numel() == 4, "the batch itself stays"


def test_tensors_are_found_in_every_container() -> None:
    batch: Any = UserDict({"a": [_batch()], "b": _Pair(torch.zeros(()), torch.ones(2, 5))})
    assert batch_size_of(batch) == 4
    assert [tuple(tensor.shape) for tensor in tensors_of(batch)] == [(4,), (4,), (4, 2), (), (2, 5)]


def test_other_mappings_keep_their_type() -> None:
    first, _ = split_batch(UserDict({"ids": torch.arange(4)}), 2)
    assert isinstance(first, UserDict)
    assert first["ids"].tolist() == [0, 1]


def test_outputs_of_every_form_are_merged() -> None:
    def output(value: float) -> dict[str, Any]:
        scalar, vector = torch.tensor(value), torch.full((2,), value)
        return {
            "loss": scalar,
            "labels": _Labels(vector, value),
            "pair": _Pair(scalar, vector),
            "names": [str(value)],
        }

    merged = merge_outputs([output(1.0), None, output(4.0)], [1.0, 5.0, 2.0])
    assert merged["loss"] == merged["pair"].x == merged["labels"].weight == 3.0
    assert merged["labels"].values.tolist() == merged["pair"].y.tolist() == [1, 1, 4, 4]
    assert merged["names"] == ["1.0", "4.0"]
    same = merge_outputs(
        [{"kind": "a", "count": 3, "name": "b"}, {"kind": "a", "count": 3, "name": "c"}], [1.0, 2.0]
    )
    assert same == {"kind": "a", "count": 3, "name": ["b", "c"]}
    assert merge_outputs(
        [{"kind": _Kind.A, "name": _Kind.A}, {"kind": _Kind.A, "name": _Kind.B}], [1.0, 2.0]
    ) == {
        "kind": _Kind.A,
        "name": [_Kind.A, _Kind.B],
    }


def test_texts_alone_are_cut() -> None:
    assert split_batch(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert split_batch({"text": ["a", "b"], "tags": ["c", "d"], "name": "e"}, 1) == [
        {"text": ["a"], "tags": ["c"], "name": "e"},
        {"text": ["b"], "tags": ["d"], "name": "e"},
    ]


def test_texts_in_tuples_are_cut() -> None:
    batch = torch.utils.data.default_collate([("a", 1.0), ("b", 2.0), ("c", 3.0)])
    assert isinstance(batch[0], tuple), "torch's own form"
    parts = split_batch(batch, 2)
    assert [part[0] for part in parts] == [("a", "b"), ("c",)]
    assert merge_outputs([(part[0], part[1]) for part in parts], [2, 1], [2, 1])[0] == (
        "a",
        "b",
        "c",
    )


def test_lists_with_an_entry_for_each_sample_are_joined() -> None:
    parts = torch.arange(15.0).view(5, 3).split(3)
    merged = merge_outputs([list(part) for part in parts], [3, 2], [3, 2])
    assert torch.equal(torch.stack(merged), torch.arange(15.0).view(5, 3))
    pair = merge_outputs([[part, -part] for part in (parts[1], parts[1])], [2, 2], [2, 2])
    assert [tuple(tensor.shape) for tensor in pair] == [(4, 3), (4, 3)], (
        "two tensors of a batch of two"
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_results_at_fixed_places_are_averaged_whatever_the_micro_batch_size(kind: type) -> None:
    """Two entries, two samples: no entry for each sample."""
    loss, accuracy = merge_outputs(
        [kind([torch.tensor(x), torch.tensor(10 * x)]) for x in (1.0, 4.0)], [1, 1], [2, 2]
    )
    assert (loss, accuracy) == (2.5, 25.0)
    output = [torch.ones(2, 4), torch.tensor(1.0)]
    predictions, loss = merge_outputs([kind(output), kind(output)], [1, 1], [2, 2])
    assert predictions.shape == (4, 4) and loss == 1.0


def test_what_cannot_be_cut_is_named() -> None:
    class Graphs:
        pass

    with pytest.raises(
        ConfigError,
        match=r"type Graphs holds no tensors .* micro-batches of 2. .* define split_batch",
    ):
        split_batch(Graphs(), 2)
    assert len(split_batch(Graphs(), None)) == 1


def test_arrays_are_joined() -> None:
    assert merge_outputs([np.arange(2), np.arange(3)], [2.0, 3.0]).tolist() == [0, 1, 0, 1, 2]
