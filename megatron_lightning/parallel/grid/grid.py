"""Megatron's rank numbering, the ranks of every group, as pure arithmetic without torch.

Two grids share the same ranks and the axis ``pp``: the *dense* grid has the axes tp, cp, dp, pp,
the *expert* grid etp, ep, edp, pp. The leftmost axis of the order string varies fastest. The order
string places etp and edp at the positions of tp and dp. A group for several axes of a grid
(``"tp-pp"``) varies over all of the axes, in the order of the string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.layout import ParallelLayout

_EXPERT_AXES: Mapping[str, str] = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""Axis of the order string -> axis of the expert grid."""


class RankGrid:
    """The grid of ``world_size`` ranks described by a layout.

    Raises:
        ConfigError: If the world is not a multiple of the layout's sizes, or the two grids disagree
            about the pipelines.
    """

    def __init__(self, layout: ParallelLayout, world_size: int) -> None:
        self.layout = layout
        self.world_size = world_size
        self._sizes = {
            "tp": layout.tp,
            "cp": layout.cp,
            "dp": layout.data_parallel_size(world_size),
            "pp": layout.pp,
        }
        expert_data = world_size // (layout.etp * layout.ep * layout.pp)
        self._sizes |= {"etp": layout.etp, "ep": layout.ep, "edp": expert_data}
        order = layout.order.split("-")
        self._grids = [
            [axis for axis in order if axis != "ep"],
            [_EXPERT_AXES[axis] for axis in order if axis != "cp"],
        ]
        self._strides: dict[str, int] = {}
        for grid in self._grids:
            stride = 1
            for axis in grid:
                if self._strides.setdefault(axis, stride) != stride and self._sizes[axis] > 1:
                    raise ConfigError(
                        f"order {layout.order!r} gives dense layers pipelines of ranks "
                        f"{self._strides[axis]} apart and experts of ranks {stride} apart. Put pp "
                        "last in the order."
                    )
                stride *= self._sizes[axis]

    def __repr__(self) -> str:
        sizes = " x ".join(
            f"{axis} {self._sizes[axis]}"
            for axis in ("tp", "cp", "dp", "pp")
            if self._sizes[axis] > 1
        )
        return f"RankGrid({self.world_size} ranks: {sizes or 'no parallel axis'})"

    def _divide(self, axes: str) -> tuple[list[str], list[str]]:
        """Return ``axes`` and the other axes of their grid, both in the order of the order
        string.
        """
        axis_names = set(axes.split("-"))
        for grid in self._grids:
            if axis_names.issubset(grid):
                return [axis for axis in grid if axis in axis_names], [
                    axis for axis in grid if axis not in axis_names
                ]
        raise ConfigError(
            f"there is no group {axes!r}: dense axes are tp, cp, dp, pp, axes of experts etp, ep, "
            "edp, pp."
        )

    def size(self, axes: str) -> int:
        """Return the number of ranks in a group over ``axes`` (such as ``"dp-cp"``)."""
        size = 1
        for axis in self._divide(axes)[0]:
            size *= self._sizes[axis]
        return size

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of ``rank`` on an axis."""
        return rank // self._strides[axis] % self._sizes[axis]

    def group_of(self, rank: int, axes: str) -> tuple[int, ...]:
        """Return the ranks that share all other coordinates with ``rank``, including ``rank``."""
        varied, _ = self._divide(axes)
        return self._spread(
            rank - sum(self.coordinate(rank, axis) * self._strides[axis] for axis in varied), varied
        )

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group over ``axes``, in Megatron's order of enumeration."""
        varied, fixed = self._divide(axes)
        return tuple(self._spread(first, varied) for first in self._spread(0, fixed))

    def _spread(self, first: int, axes: list[str]) -> tuple[int, ...]:
        """Return the ranks from ``first`` on that differ in ``axes`` only, the first axis
        fastest.
        """
        ranks = [first]
        for axis in axes:
            ranks = [
                rank + i * self._strides[axis] for i in range(self._sizes[axis]) for rank in ranks
            ]
        return tuple(ranks)

    def embedding_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the first and last rank of this rank's pipeline, the holders of tied
        embeddings.
        """
        pipeline = self.group_of(rank, "pp")
        return (pipeline[0],) if len(pipeline) == 1 else (pipeline[0], pipeline[-1])


def divided(
    ranks: Sequence[int], position: int, num_parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide a group into ``num_parts`` parts of neighboring ranks.

    Returns:
        The part of the rank at ``position``, and the ranks at the same place of every part.
    """
    size = len(ranks) // num_parts
    first, place = position - position % size, position % size
    return tuple(ranks[first : first + size]), tuple(ranks[place::size])
