"""Compare tensors between the ranks of a group without sending tensors.

Each rank sums a tensor's elements with fixed random signs. Sums distinguish tensors as well as the
tensors' distance does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.grid.context import AxisGroup

DIFFERENT = 0.05
"""Of a tensor's norm. Kernels without a fixed order of summation differ by less. Two shards differ
by about the norm."""

_EQUAL = 1e-6
"""Of a tensor's norm: the same computation on the same numbers, up to such kernels."""

_MOST_ELEMENTS = 1 << 20
"""Elements compared at most. Of larger tensors equally spaced elements are compared, to limit the
memory."""

KeyT = TypeVar("KeyT", bound=Hashable)


class Spread(NamedTuple):
    """How a tensor differs between the ranks."""

    difference: float
    norm: float
    varies: bool
    """Whether the tensor differs between positions of the sequence. A batch of a single token shows
    nothing."""
    sizes_agree: bool

    @property
    def is_equal(self) -> bool:
        """Whether the ranks hold the same tensor."""
        return self.sizes_agree and self.norm > 0 and self.difference <= _EQUAL * self.norm


class RankSums(Generic[KeyT]):
    """Signed sums of tensors, by key. The keys must be the same on all ranks.

    Args:
        group: Ranks to compare.
        device: Device of the collective.
    """

    def __init__(self, group: AxisGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sums: dict[KeyT, Tensor] = {}  # signed elements, squares, differing positions [3]

    def __contains__(self, key: KeyT) -> bool:
        return key in self._sums

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._sums)

    def watch(self, key: KeyT) -> None:
        """Begin the sum of a key. Restart the sum of a key already watched."""
        self._sums[key] = torch.zeros(3, dtype=torch.float64, device=self._device)

    def forget(self, key: KeyT) -> None:
        """End the sum of a key."""
        del self._sums[key]

    def clear(self) -> None:
        """Forget all keys."""
        self._sums.clear()

    def add(self, key: KeyT, tensor: Tensor, dim: int | None = None) -> None:
        """Add a tensor to the sum of ``key``, if the key is watched. ``dim``: of the sequence."""
        if key not in self._sums:
            return
        tensor = tensor.detach()
        tensor = tensor.to_dense() if tensor.is_sparse else tensor
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
        flat = flat[:: 1 + len(flat) // _MOST_ELEMENTS].float()
        position = torch.arange(len(flat), device=flat.device)
        signs = 1 - 2 * ((position * 2654435761 >> 16) & 1)  # Knuth's multiplicative hash
        varies = torch.zeros((), dtype=torch.float64, device=flat.device)
        if dim is not None and dim < tensor.dim() - 1:
            varies = (tensor != tensor.narrow(dim, 0, 1)).any().double()
        self._sums[key] += torch.stack(
            [
                (flat * signs).sum(dtype=torch.float64),
                flat.square().sum(dtype=torch.float64),
                varies,
            ]
        ).to(self._device)

    def spreads(self) -> dict[KeyT, Spread] | None:
        """Return how the ranks differ. None: nothing is watched, or not all sums are finite yet. A
        collective if anything is watched.
        """
        if not self._sums:
            return None
        signed, squares, varies = torch.stack(list(self._sums.values())).unbind(1)
        signed, squares = signed.nan_to_num(), squares.nan_to_num(nan=torch.inf)
        extremes = torch.cat([signed, -signed, squares, -squares, varies])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group.process_group)
        high, low, large, small, varies = extremes.chunk(5)
        if not large.isfinite().all():  # e.g. the loss scale is still too high
            for total in self._sums.values():
                total.zero_()
            return None
        agree = large + small <= _EQUAL * large
        columns = [(high + low).tolist(), large.sqrt().tolist(), (varies > 0).tolist()]
        rows = zip(*columns, agree.tolist(), strict=True)
        return {key: Spread(*row) for key, row in zip(self._sums, rows, strict=True)}
