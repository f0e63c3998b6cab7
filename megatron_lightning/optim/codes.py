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

    coder: WeightCoder
    ranges: Sequence[Range]
    device: torch.device

    def largest(self) -> Tensor:
        """Return the largest values in this rank's ranges."""
        largest = torch.zeros(self.coder.num_scales, device=self.device)
        for start, values, _ in self.ranges:
            torch.maximum(largest, self.coder.largest(values, start), out=largest)
        return largest


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
    if not weights:
        return
    sizes = [weight.coder.num_scales for weight in weights]
    largest = torch.cat([weight.largest() for weight in weights])
    reduce(largest, group, dist.ReduceOp.MAX)
    tables = torch.split(largest, sizes)
    _share(weights, tables, reduce)
    for weight, table in zip(weights, tables, strict=True):
        for start, values, codes in weight.ranges:
            codes.copy_(weight.coder.encode(values, start, table).view(torch.uint8))
        weight.coder.set_scales(table)


def _share(weights: Sequence[CodedWeight], tables: Sequence[Tensor], reduce: AllReduce) -> None:
    """Reduce the largest values of weights whose other parts are on other ranks; in one message for
    each group.
    """
    shared: dict[AxisGroup, list[Tensor]] = {}
    for weight, table in zip(weights, tables, strict=True):
        if weight.coder.group is not None:
            shared.setdefault(weight.coder.group, []).append(table)
    for over in sorted(shared, key=lambda axis: axis.name):
        together = torch.cat(shared[over])
        reduce(together, over, dist.ReduceOp.MAX)
        for table, values in zip(
            shared[over], torch.split(together, [len(table) for table in shared[over]]), strict=True
        ):
            table.copy_(values)
