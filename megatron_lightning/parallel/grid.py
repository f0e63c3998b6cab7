"""Which ranks form which group: Megatron's rank numbering as pure arithmetic, without torch.

Two grids share the same ranks. The *dense* grid has the axes tp, cp, dp, pp; the *expert* grid has etp (named tp there),
ep, edp (named dp there), pp. The leftmost axis of the order string varies fastest. A group for several axes
(``"tp-pp"``) varies over all of them, in the order of the order string.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.layout import ParallelLayout

GridName = Literal["dense", "expert"]


class RankGrid:
    """The grid of ``world_size`` ranks that a layout describes.

    Args:
        layout: Sizes of the axes.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the world is not a multiple of the layout's sizes.
    """

    def __init__(self, layout: ParallelLayout, world_size: int) -> None:
        self.layout, self.world_size = layout, world_size
        data = layout.data_parallel_size(world_size)
        expert_data = world_size // (layout.etp * layout.ep * layout.pp)
        self._sizes: dict[str, dict[str, int]] = {
            "dense": {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": data, "pp": layout.pp},
            "expert": {"tp": layout.etp, "cp": 1, "ep": layout.ep, "dp": expert_data, "pp": layout.pp},
        }

    def __repr__(self) -> str:
        sizes = " x ".join(f"{axis} {size}" for axis, size in self._sizes["dense"].items() if size > 1)
        return f"RankGrid({self.world_size} ranks: {sizes or 'no parallel axis'})"

    @cached_property
    def _strides(self) -> dict[str, dict[str, int]]:
        strides: dict[str, dict[str, int]] = {}
        for grid, sizes in self._sizes.items():
            stride, strides[grid] = 1, {}
            for axis in self.layout.order.split("-"):
                strides[grid][axis] = stride
                stride *= sizes[axis]
        return strides

    def _axes(self, axes: str) -> list[str]:
        named = axes.split("-")
        unknown = [axis for axis in named if axis not in self._sizes["dense"]]
        if unknown:
            raise ConfigError(f"no axis {unknown[0]!r} in the grid; its axes are {', '.join(self._sizes['dense'])}.")
        return [axis for axis in self.layout.order.split("-") if axis in named]

    def size(self, axes: str, grid: GridName = "dense") -> int:
        """Return the number of ranks in a group over ``axes`` (such as ``"dp-cp"``)."""
        size = 1
        for axis in self._axes(axes):
            size *= self._sizes[grid][axis]
        return size

    def coordinate(self, rank: int, axis: str, grid: GridName = "dense") -> int:
        """Return where ``rank`` stands on one axis."""
        return rank // self._strides[grid][axis] % self._sizes[grid][axis]

    def group_of(self, rank: int, axes: str, grid: GridName = "dense") -> tuple[int, ...]:
        """Return the ranks that share all other coordinates with ``rank``, itself included."""
        base = rank
        for axis in self._axes(axes):
            base -= self.coordinate(rank, axis, grid) * self._strides[grid][axis]
        ranks = [base]
        for axis in self._axes(axes):
            stride, size = self._strides[grid][axis], self._sizes[grid][axis]
            ranks = [r + i * stride for i in range(size) for r in ranks]
        return tuple(ranks)

    def groups(self, axes: str, grid: GridName = "dense") -> tuple[tuple[int, ...], ...]:
        """Return every group over ``axes``, in Megatron's order of enumeration."""
        others = [axis for axis in self.layout.order.split("-") if axis not in self._axes(axes)]
        firsts = [0]
        for axis in others:
            stride, size = self._strides[grid][axis], self._sizes[grid][axis]
            firsts = [r + i * stride for i in range(size) for r in firsts]
        return tuple(self.group_of(first, axes, grid) for first in firsts)

    def embedding_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the first and last pipeline rank of this rank's pipeline: the holders of tied embeddings."""
        pipeline = self.group_of(rank, "pp")
        return (pipeline[0],) if len(pipeline) == 1 else (pipeline[0], pipeline[-1])
