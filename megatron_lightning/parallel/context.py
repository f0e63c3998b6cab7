"""The process groups of this rank, as an object that is passed to whoever needs one.

A :class:`ParallelContext` is made once the default process group exists (or for a single process without one) and creates
every group eagerly and in the same order on all ranks. Two contexts may live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.grid import GridName, RankGrid
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.rng import RngStreams

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# Creation order is fixed: features such as SHARP bind to the group created first (contracts of Megatron-Core).
_DENSE_GROUPS = ("dp-cp", "dp", "cp", "tp", "pp", "tp-pp", "tp-cp", "tp-dp-cp")
_EXPERT_GROUPS = ("ep", "tp", "tp-ep", "tp-ep-pp", "dp")


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks that share one or several axes with this rank. A group of one rank needs no process group."""

    name: str
    """Axis or axes, such as ``"tp"`` or ``"dp-cp"``."""
    ranks: tuple[int, ...]
    """Global ranks, ascending; the position is the coordinate."""
    rank: int
    """This rank's coordinate in the group."""
    process_group: dist.ProcessGroup | None
    """The communicator; None for a group of one."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether the exception that ended an earlier run has broken the communicator."""
        return self.process_group is not None and not compat.is_connected(self.process_group)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's picklable ``value``, by coordinate; a collective."""
        if self.process_group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast_object(self, value: T) -> T:
        """Return the first rank's picklable ``value``; a collective, to which the others may give anything."""
        if self.process_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.process_group)
        return box[0]

    def __deepcopy__(self, memo: object) -> AxisGroup:
        return self  # modules that hold a group are copied by callbacks (weight averaging); the communicator is not

    def __reduce__(self) -> tuple[object, ...]:
        return (AxisGroup, (self.name, self.ranks, self.rank, None))  # a communicator cannot travel to another process


class ParallelContext:
    """Groups and random streams of one rank under one layout.

    Args:
        layout: Sizes of the axes.
        device: Where this rank's tensors live.
        seed: Base of the named random streams.
        timeout: Limit of a collective; None: the default process group's.
        alone: Whether this process is a world of its own, though it may be a rank of a default process group as well.

    Raises:
        ConfigError: If the world size does not fit the layout.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        device: torch.device | str = "cpu",
        seed: int = 1234,
        timeout: timedelta | None = None,
        alone: bool = False,
    ) -> None:
        initialized = dist.is_available() and dist.is_initialized() and not alone
        self.layout, self.device = layout, torch.device(device)
        self.world_size = dist.get_world_size() if initialized else 1
        self.rank = dist.get_rank() if initialized else 0
        self.grid = RankGrid(layout, self.world_size)
        self._timeout = timeout
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        world = tuple(range(self.world_size))
        if initialized:
            self._by_ranks[world] = dist.group.WORLD
        self._groups: dict[tuple[str, str], AxisGroup] = {("dense", "world"): self._axis_group("world", world)}
        for name in _DENSE_GROUPS:
            self._groups["dense", name] = self._axis_group(name, self.grid.group_of(self.rank, name))
        for name in _EXPERT_GROUPS:
            self._groups["expert", name] = self._axis_group(name, self.grid.group_of(self.rank, name, "expert"))
        embedding = self.grid.embedding_group_of(self.rank)
        self._groups["dense", "embedding"] = self._axis_group("embedding", embedding)
        self.rng = RngStreams(
            seed,
            device=self.device,
            tp_rank=self.tp.rank,
            pp_rank=self.pp.rank,
            ep_rank=self.axis("ep", "expert").rank,
            etp_rank=self.axis("tp", "expert").rank,
        )

    def _axis_group(self, name: str, ranks: tuple[int, ...]) -> AxisGroup:
        """Create the group, or reuse the communicator of the same ranks: equal for all members, so no rank waits."""
        ranks = tuple(sorted(ranks))
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = self.new_process_group(ranks, name)
        position = ranks.index(self.rank) if self.rank in ranks else -1
        return AxisGroup(name, ranks, position, self._by_ranks[ranks])

    def new_process_group(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup | None:
        """Create a communicator of its own for ``ranks``; None on other ranks, and for fewer than two.

        Every rank calls this equally often, for groups that it is in or not.
        """
        if len(ranks) < 2:
            return None
        if self.rank not in ranks:
            # torch names a group by its ranks and the number of groups this rank has made: without one more here, the next
            # group that is shared with a member of this one would have two names, and both sides would wait forever.
            dist.new_group([self.rank], timeout=self._timeout, use_local_synchronization=True)
            return None
        group = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=name)
        if not isinstance(group, dist.ProcessGroup):
            raise ShardingError(f"torch.distributed gave rank {self.rank} no communicator for the {name} group of {ranks}")
        return group

    def axis(self, axes: str, grid: GridName = "dense") -> AxisGroup:
        """Return the group over ``axes`` (``"tp"``, ``"dp-cp"``, ``"tp-pp"``, ``"world"``, ``"embedding"``, …)."""
        return self._groups[grid, axes]

    @property
    def tp(self) -> AxisGroup:
        """Tensor-parallel group."""
        return self.axis("tp")

    @property
    def pp(self) -> AxisGroup:
        """Pipeline-parallel group; its coordinates are pipeline coordinates, not stages."""
        return self.axis("pp")

    @property
    def dp(self) -> AxisGroup:
        """Data-parallel group."""
        return self.axis("dp")

    @property
    def cp(self) -> AxisGroup:
        """Context-parallel group."""
        return self.axis("cp")

    @property
    def dp_cp(self) -> AxisGroup:
        """Data x context group: the ranks that hold the same dense parameters."""
        return self.axis("dp-cp")

    @property
    def sp(self) -> bool:
        """Whether activations between tensor-parallel regions are sharded along the sequence."""
        return self.layout.sp

    def data_group(self, grid: GridName) -> AxisGroup:
        """Return the ranks that hold the same parameters of ``grid`` and share their gradient reduction."""
        return self.dp_cp if grid == "dense" else self.axis("dp", "expert")

    def divide(self, group: AxisGroup, num_parts: int) -> tuple[AxisGroup, AxisGroup]:
        """Divide a group into parts of neighbouring ranks; all ranks call this alike.

        Args:
            group: Any group of this rank.
            num_parts: A divisor of its size.

        Returns:
            This rank's part, and the ranks that have the same place in the other parts.
        """
        if num_parts == 1:
            return group, self._axis_group(f"{group.name}-replicas", (self.rank,))
        size = group.size // num_parts
        part, place = divmod(group.rank, size)
        inner, outer = group.ranks[part * size : (part + 1) * size], group.ranks[place::size]
        return self._axis_group(f"{group.name}-part", inner), self._axis_group(f"{group.name}-replicas", outer)

    def device_mesh(self) -> DeviceMesh:
        """Return the dense grid as a torch ``DeviceMesh`` with axes ``("pp", "dp", "cp", "tp")`` over the same groups.

        All ranks call this alike: axes of one rank share a communicator, which is made here.
        """
        from torch.distributed.device_mesh import DeviceMesh

        names = ("pp", "dp", "cp", "tp")
        sizes = [self.grid.size(axis) for axis in names]
        mesh = torch.empty(self.world_size, dtype=torch.int)
        for rank in range(self.world_size):
            flat = 0
            for axis, size in zip(names, sizes, strict=True):
                flat = flat * size + self.grid.coordinate(rank, axis)
            mesh[flat] = rank
        alone = dist.new_group([self.rank], timeout=self._timeout, use_local_synchronization=True, group_desc="alone")
        groups = [self.axis(name).process_group or alone for name in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=mesh.reshape(sizes), mesh_dim_names=names)
