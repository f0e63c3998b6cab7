"""Quantized data of weights with sharded main params: ranks gather a byte per weight.

A *quantizer* (of a quantized layer) quantizes any range of the layer's flattened weight, given the
amax of each scaling block. Blocks may reach into the ranges of several ranks. So the ranks agree on
the amax values first:

    every rank     amax values of its ranges           4 bytes a scale
    all-reduce     of all weights in one message, by maximum
    every rank     data of its ranges; scales of all
    all-gather     data                                1 byte a weight

The data are equal to what each rank would quantize from the full weight. Main params stay in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.optim.gradients.parameter_storage import AllReduce
from megatron_lightning.parallel.grid.context import AxisGroup


class WeightQuantizer(Protocol):
    """Quantizes a weight, and sets the scales of the layer."""

    dtype: torch.dtype
    """Dtype of the quantized data, a byte each."""
    num_scales: int
    """Scales of the weight on this rank."""
    group: AxisGroup | None
    """Group for the amax all-reduce; None if every scaling block is local."""

    def amax(self, values: Tensor, start: int) -> Tensor:
        """Return the amax of each scale's block [num_scales] within a range [n] of the flattened
        weight, beginning at ``start``. 0 for a block outside of the range.
        """
        ...

    def encode(self, values: Tensor, start: int, amax: Tensor) -> Tensor:
        """Return the quantized data [n] of a range, given the amax values of the full weight."""
        ...

    def set_scales(self, amax: Tensor) -> None:
        """Set the layer's scales from the reduced amax."""
        ...


class LibraryQuantizer(ABC):
    """Leaves the quantized data and scales of a weight to a library. A library takes ranges of many
    weights in a single call and reduces the scales.
    """

    dtype: torch.dtype
    """Dtype of the quantized data, a byte each."""

    @classmethod
    @abstractmethod
    def quantize(cls, weights: Sequence[WeightRanges], group: AxisGroup) -> None:
        """Renew the quantized data and scales of all weights of the library. A collective.

        Args:
            weights: Weights with such quantizers.
            group: Ranks of the ranges.
        """


Quantizer = WeightQuantizer | LibraryQuantizer


class Range(NamedTuple):
    """A range of a flattened weight on this rank."""

    start: int
    values: Tensor
    """Main params [n]."""
    data: Tensor
    """Quantized data [n] of the main params, uint8."""


@dataclass(frozen=True)
class WeightRanges:
    """A weight with this rank's ranges, possibly none."""

    quantizer: Quantizer
    ranges: Sequence[Range]
    device: torch.device


@torch.no_grad()
def encode(weights: Sequence[WeightRanges], group: AxisGroup, reduce: AllReduce) -> None:
    """Renew the quantized data and scales of ``weights`` from the main params. A collective.

    Args:
        weights: Weights with ranges on the ranks of ``group``.
        group: Ranks of the ranges.
        reduce: Function to reduce in place.
    """
    by_library: dict[type[LibraryQuantizer], list[WeightRanges]] = {}
    for weight in weights:
        if isinstance(weight.quantizer, LibraryQuantizer):
            by_library.setdefault(type(weight.quantizer), []).append(weight)
    for library, library_weights in by_library.items():
        library.quantize(library_weights, group)
    pairs = [(w.quantizer, w) for w in weights if not isinstance(w.quantizer, LibraryQuantizer)]
    if not pairs:
        return
    amax = torch.cat([_amax_of_ranges(quantizer, weight) for quantizer, weight in pairs])
    reduce(amax, group, dist.ReduceOp.MAX)
    tables = torch.split(amax, [quantizer.num_scales for quantizer, _ in pairs])
    _share([quantizer for quantizer, _ in pairs], tables, reduce)
    for (quantizer, weight), table in zip(pairs, tables, strict=True):
        for start, values, data in weight.ranges:
            data.copy_(quantizer.encode(values, start, table).view(torch.uint8))
        quantizer.set_scales(table)


def _amax_of_ranges(quantizer: WeightQuantizer, weight: WeightRanges) -> Tensor:
    """Return the amax of each block within this rank's ranges."""
    amax = torch.zeros(quantizer.num_scales, device=weight.device)
    for start, values, _ in weight.ranges:
        torch.maximum(amax, quantizer.amax(values, start), out=amax)
    return amax


def _share(
    quantizers: Sequence[WeightQuantizer], tables: Sequence[Tensor], reduce: AllReduce
) -> None:
    """Reduce the amax of weights with shards on other ranks, in a single message for each group."""
    tensors_by_group: dict[AxisGroup, list[Tensor]] = {}
    for quantizer, table in zip(quantizers, tables, strict=True):
        if quantizer.group is not None:
            tensors_by_group.setdefault(quantizer.group, []).append(table)
    for over in sorted(tensors_by_group, key=lambda axis: axis.name):
        together = torch.cat(tensors_by_group[over])
        reduce(together, over, dist.ReduceOp.MAX)
        for table, values in zip(
            tensors_by_group[over],
            torch.split(together, [len(table) for table in tensors_by_group[over]]),
            strict=True,
        ):
            table.copy_(values)
