"""The process groups of a rank, as an object to pass on.

A :class:`ParallelContext` is made once the default process group exists (or for a single process
without a group) and creates every group eagerly and in the same order on all ranks. Two contexts
may live in a process. All groups are destroyed at the end of the process's main thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.calls import Call, check_calls, current_call
from megatron_lightning.parallel.grid.grid import RankGrid, divided
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.grid.nccl import (
    CommunicatorKey,
    NcclOptions,
    communicator_key,
    options_of_communicators,
)
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.rules import check_levels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# Creation order is fixed, as in megatron/core/parallel_state.py: features such as SHARP bind to the
# group created first.
_DENSE_GROUPS = ("dp-cp", "dp", "cp", "tp", "pp", "tp-pp", "tp-cp", "tp-dp-cp")
_EXPERT_GROUPS = ("ep", "etp", "etp-ep", "etp-ep-pp", "edp")
GROUPS = (*_DENSE_GROUPS, *_EXPERT_GROUPS)
"""Names of the groups of axes."""


class _Sent(NamedTuple):
    """A rank's value in a collective of objects."""

    call: Call
    value: Any


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks that share one or several axes with this rank. A group of a single rank needs no
    process group.
    """

    name: str
    """Axis or axes, such as ``"tp"`` or ``"dp-cp"``."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """This rank's position in ``ranks``. -1: this rank is in another group of the kind."""
    process_group: dist.ProcessGroup | None
    """The communicator. None for a group of a single rank."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether an exception in an earlier run has broken the communicator."""
        return self.process_group is not None and not compat.is_connected(self.process_group)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's picklable ``value``, in rank order. A collective.

        Raises:
            RankError: On every rank, if another function on some ranks calls a collective.
        """
        if self.process_group is None:
            return [value]
        messages: list[Any] = [None] * self.size
        message = _Sent(current_call(1), value)
        dist.all_gather_object(messages, message, group=self.process_group)
        check_calls(self.ranks, [v.call if isinstance(v, _Sent) else None for v in messages])
        return [sent.value for sent in messages]

    def broadcast_object(self, value: T) -> T:
        """Return the first rank's picklable ``value``. A collective that ignores the other ranks'
        values.
        """
        if self.process_group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[0], group=self.process_group)
        return values[0]

    def __deepcopy__(self, memo: object) -> AxisGroup:
        # Callbacks copy modules with a group (weight averaging). The communicator is not copied.
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # A communicator cannot travel to another process.
        return (AxisGroup, (self.name, self.ranks, self.rank, None))


ALONE = AxisGroup("alone", (0,), 0, None)
"""The group of a process without other ranks."""


class ParallelContext:
    """Groups and random streams of a rank under a layout.

    Args:
        layout: Sizes of the axes.
        device: Device of this rank's tensors.
        seed: Base of the named random streams.
        context_options: How queries meet the keys of other context-parallel ranks.
        timeout: Limit of a collective. None: the default process group's limit.
        alone: Whether to ignore the default process group, so that this process is the only rank.
        planned_world_size: Ranks of a job that is only described, from rank 0, without
            communicators. None: a real job.
        nccl_options: Options of the communicators on GPUs, by the name of the group.

    Raises:
        ConfigError: If two groups of the same ranks have different options.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        device: torch.device | str = "cpu",
        seed: int = 1234,
        context_options: ContextOptions | None = None,
        timeout: timedelta | None = None,
        alone: bool = False,
        planned_world_size: int | None = None,
        nccl_options: Mapping[str, NcclOptions] | None = None,
    ) -> None:
        alone = alone or planned_world_size is not None
        initialized = dist.is_available() and dist.is_initialized() and not alone
        self.layout = layout
        self.context_options = context_options or ContextOptions()
        self.device = torch.device(device)
        self.world_size = dist.get_world_size() if initialized else planned_world_size or 1
        self.rank = dist.get_rank() if initialized else 0
        self.grid = RankGrid(layout, self.world_size)
        self._timeout = timeout
        self._is_planned = planned_world_size is not None
        self._communicators: dict[CommunicatorKey, dist.ProcessGroup | None] = {}
        world = tuple(range(self.world_size))
        ranks_of = {name: tuple(sorted(self.grid.group_of(self.rank, name))) for name in GROUPS}
        keys = {name: communicator_key(name, ranks) for name, ranks in ranks_of.items()}
        self._nccl_options = options_of_communicators(nccl_options or {}, keys)
        if initialized:
            self._communicators[communicator_key("world", world)] = dist.group.WORLD
            compat.at_end_of_main_thread(compat.destroy_process_groups, last=True)
        self._groups = {"world": self._axis_group("world", world)}
        if communicator_key("world", world) in self._nccl_options or layout.replica_size > 1:
            # The default group may have other options. And users' collectives on the default group
            # must be distinguishable from our own collectives of an axis over all ranks.
            del self._communicators[communicator_key("world", world)]
        for name in GROUPS:
            self._groups[name] = self._axis_group(name, ranks_of[name])
        self._groups["embedding"] = self._axis_group(
            "embedding", self.grid.embedding_group_of(self.rank)
        )
        self.tp = self._groups["tp"]
        self.cp = self._groups["cp"]
        self.dp = self._groups["dp"]
        self.pp = self._groups["pp"]
        self.ep = self._groups["ep"]
        self.etp = self._groups["etp"]
        self.edp = self._groups["edp"]
        """The ranks with the same experts' parameters."""
        self.dp_cp = self._groups["dp-cp"]
        """The ranks with the same dense parameters."""
        self.cp_levels = self._levels()
        """Neighbors among the context-parallel ranks, and the ranks at the same position of the
        other groups of neighbors. None: no levels."""
        if initialized and self.device.type == "cpu":
            # gloo connects a group's members one by one. A rank that failed or ended right after
            # its own connections would break the connections that its peers still set up.
            dist.barrier()
        self.rng = RngStreams(
            seed,
            device=self.device,
            tp_rank=self.tp.rank,
            cp_rank=self.cp.rank,
            pp_rank=self.pp.rank,
            ep_rank=self.ep.rank,
            etp_rank=self.etp.rank,
        )

    def _levels(self) -> tuple[AxisGroup, AxisGroup] | None:
        check_levels(self.context_options, self.cp.size)
        sizes = self.context_options.hierarchical_context_parallel_sizes
        if sizes is None:
            return None
        levels = divided(self.cp.ranks, self.cp.rank, sizes[1])
        inner, outer = map(self._axis_group, ("cp-inner", "cp-outer"), levels)
        return inner, outer

    def _axis_group(self, name: str, ranks: tuple[int, ...]) -> AxisGroup:
        """Create the group, or reuse a communicator (:func:`communicator_key`): equal for all
        members, so no rank waits.
        """
        ranks = tuple(sorted(ranks))
        key = communicator_key(name, ranks)
        if key not in self._communicators:
            self._communicators[key] = self.new_process_group(ranks, name)
        position = ranks.index(self.rank) if self.rank in ranks else -1
        return AxisGroup(name, ranks, position, self._communicators[key])

    def new_process_group(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup | None:
        """Create another communicator for ``ranks``. None on other ranks, and for fewer than two.
        All ranks call this with equal arguments.
        """
        if len(ranks) < 2 or self._is_planned:
            return None
        if self.rank not in ranks:
            # torch names a group by the group's ranks and the number of groups made by this rank.
            # Without one more group here, the next group shared with a member of this group would
            # have two names, and both sides would wait forever.
            dist.new_group([self.rank], timeout=self._timeout, use_local_synchronization=True)
            return None
        key = communicator_key(name, ranks)
        options = self._nccl_options.get(key) if self.device.type == "cuda" else None
        group = dist.new_group(
            list(ranks),
            timeout=self._timeout,
            use_local_synchronization=True,
            group_desc=name,
            pg_options=None if options is None else options.for_torch(),
        )
        if not isinstance(group, dist.ProcessGroup):
            raise ShardingError(
                f"torch.distributed gave rank {self.rank} no communicator for the {name} group of "
                f"{ranks}"
            )
        return group

    def axis(self, name: str) -> AxisGroup:
        """Return the group over an axis (``"tp"``) or several (``"dp-cp"``, ``"tp-pp"``),
        ``"world"`` or ``"embedding"``.
        """
        return self._groups[name]

    def holders(self, ranks: tuple[int, ...]) -> AxisGroup:
        """Return the group of the pipeline ranks with copies of a parameter, usually of tied
        embeddings. All ranks call this with equal arguments.
        """
        return self._axis_group("embedding", ranks)

    @property
    def sp(self) -> bool:
        """Whether activations between tensor-parallel regions are sharded along the sequence."""
        return self.layout.sp

    def divide(self, group: AxisGroup, num_parts: int) -> tuple[AxisGroup, AxisGroup]:
        """Divide a group into ``num_parts`` groups of neighboring ranks. All ranks call this with
        equal arguments.

        Returns:
            This rank's part, and the ranks at the same position in the other parts.
        """
        if num_parts == 1:
            return group, self._axis_group(f"{group.name}-replicas", (self.rank,))
        inner, outer = divided(group.ranks, group.rank, num_parts)
        return self._axis_group(f"{group.name}-part", inner), self._axis_group(
            f"{group.name}-replicas", outer
        )

    def device_mesh(self) -> DeviceMesh:
        """Return the dense grid as a torch ``DeviceMesh`` with axes ``("pp", "dp", "cp", "tp")``
        over the same groups.

        All ranks call this together, since the call creates the communicator for axes of a single
        rank.
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
        alone = dist.new_group(
            [self.rank], timeout=self._timeout, use_local_synchronization=True, group_desc="alone"
        )
        groups = [self.axis(name).process_group or alone for name in names]
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=mesh.reshape(sizes), mesh_dim_names=names
        )
