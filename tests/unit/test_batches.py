"""Batches are cut into micro-batches, and outputs of micro-batches are put together, whatever they are made of."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.strategies.batches import batch_size_of, merge_outputs, split_batch, tensors_of


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


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


def _batch() -> _Batch:
    return _Batch(torch.arange(4), _Labels(torch.arange(4) * 2), list("abcd"), (torch.arange(8).view(4, 2),))


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
        return {"loss": scalar, "labels": _Labels(vector, value), "pair": _Pair(scalar, vector), "names": [str(value)]}

    merged = merge_outputs([output(1.0), None, output(4.0)], [1.0, 5.0, 2.0])
    assert merged["loss"] == merged["pair"].x == merged["labels"].weight == 3.0
    assert merged["labels"].values.tolist() == merged["pair"].y.tolist() == [1, 1, 4, 4]
    assert merged["names"] == ["1.0", "4.0"]
