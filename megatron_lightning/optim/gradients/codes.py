"""Codes of 8 bits of weights whose main params are sharded, so that ranks gather one byte a weight.

A *coder* (of a quantized layer) makes codes of any range of its flattened weight, given the largest
values of what shares a scale. Blocks may reach into the ranges of several ranks, which therefore
agree on these largest values first:

    every rank     largest values of its ranges        4 bytes a scale
    all-reduce     of all weights in one message, by their maximum
    every rank     codes of its ranges; scales of all
    all-gather     codes                               1 byte a weight

The codes are those that each rank would make of the full weight. Main params stay in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.context import AxisGroup


class WeightCoder(Protocol):
    """Makes codes of one weight, and gives their scales to the layer."""

    dtype: torch.dtype
    """Of the codes, one byte each."""
    num_scales: int
    """Scales of the weight on this rank."""
    group: AxisGroup | None
    """Ranks that hold other parts of what shares a scale; None: this one and its replicas hold
    all."""

    def largest(self, values: Tensor, start: int) -> Tensor:
        """Return the largest absolute value of every scale's weights [num_scales] within a range
        [n] of the flattened weight, from ``start`` on; 0 where none is in it.
        """
        ...

    def encode(self, values: Tensor, start: int, largest: Tensor) -> Tensor:
        """Return the codes [n] of a range, given the largest values of the full weight."""
        ...

    def set_scales(self, largest: Tensor) -> None:
        """Multiply by the scales that follow from the largest values from now on."""
        ...


class LibraryCoder(ABC):
    """Leaves the codes and scales of a weight to a library, which takes parts of many weights in
    one call and agrees on their scales by itself.
    """

    dtype: torch.dtype
    """Of the codes, one byte each."""

    @classmethod
    @abstractmethod
    def quantize(cls, weights: Sequence[CodedWeight], group: AxisGroup) -> None:
        """Renew the codes of the ranges of all of the library's weights, and the scales. A
        collective.

        Args:
            weights: Weights with such coders.
            group: Ranks that share their ranges.
        """


Coder = WeightCoder | LibraryCoder


class Range(NamedTuple):
    """A range of a flattened weight that this rank keeps."""

    start: int
    values: Tensor
    """Main params [n]."""
    codes: Tensor
    """Their codes [n], uint8."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight of which this rank keeps some ranges, or none."""

    coder: Coder
    ranges: Sequence[Range]
    device: torch.device


AllReduce = Callable[[Tensor, AxisGroup, dist.ReduceOp.RedOpType], None]


def all_reduce(tensor: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce in place over the ranks of a group."""
    dist.all_reduce(tensor, op, group=group.process_group)


@torch.no_grad()
def encode(weights: Sequence[CodedWeight], group: AxisGroup, reduce: AllReduce) -> None:
    """Renew the codes and scales of ``weights`` from their main params. A collective.

    Args:
        weights: Weights whose ranges the ranks of ``group`` share.
        group: These ranks.
        reduce: Reduces in place.
    """
    by_library: dict[type[LibraryCoder], list[CodedWeight]] = {}
    for weight in weights:
        if isinstance(weight.coder, LibraryCoder):
            by_library.setdefault(type(weight.coder), []).append(weight)
    for library, some in by_library.items():
        library.quantize(some, group)
    own = [(w.coder, w) for w in weights if not isinstance(w.coder, LibraryCoder)]
    if not own:
        return
    largest = torch.cat([_largest(coder, weight) for coder, weight in own])
    reduce(largest, group, dist.ReduceOp.MAX)
    tables = torch.split(largest, [coder.num_scales for coder, _ in own])
    _share([coder for coder, _ in own], tables, reduce)
    for (coder, weight), table in zip(own, tables, strict=True):
        for start, values, codes in weight.ranges:
            codes.copy_(coder.encode(values, start, table).view(torch.uint8))
        coder.set_scales(table)


def _largest(coder: WeightCoder, weight: CodedWeight) -> Tensor:
    """Return the largest values in this rank's ranges."""
    largest = torch.zeros(coder.num_scales, device=weight.device)
    for start, values, _ in weight.ranges:
        torch.maximum(largest, coder.largest(values, start), out=largest)
    return largest


def _share(coders: Sequence[WeightCoder], tables: Sequence[Tensor], reduce: AllReduce) -> None:
    """Reduce the largest values of weights whose other parts are on other ranks; in one message for
    each group.
    """
    shared: dict[AxisGroup, list[Tensor]] = {}
    for coder, table in zip(coders, tables, strict=True):
        if coder.group is not None:
            shared.setdefault(coder.group, []).append(table)
    for over in sorted(shared, key=lambda axis: axis.name):
        together = torch.cat(shared[over])
        reduce(together, over, dist.ReduceOp.MAX)
        for table, values in zip(
            shared[over], torch.split(together, [len(table) for table in shared[over]]), strict=True
        ):
            table.copy_(values)
