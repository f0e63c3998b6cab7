"""A process among the ranks of the job: process groups, collectives, and the watch for failures of
other ranks.

Values differ between ranks along the data-parallel axis only, so the data-parallel group is the
default group. The full world takes decisions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from megatron_lightning import compat
from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.processes import (
    init_process_group,
    random_states,
    set_random_states,
)
from megatron_lightning.parallel.collectives import gather_sequence
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.grid.nccl import NcclOptions
from megatron_lightning.parallel.random.replica_rng import ReplicaStreams
from megatron_lightning.resilience.collective_log import Course
from megatron_lightning.resilience.connections import cut_connections
from megatron_lightning.resilience.failure_watch import FailureWatch
from megatron_lightning.resilience.restart import restarts_in_process


class ProcessGroups:
    """Groups of one process. Groups outlive a run, and are left out of a pickle.

    Args:
        layout: Sizes of the parallel axes.
        backend: Backend of torch.distributed. None: gloo on CPU, NCCL (and gloo for CPU tensors) on
            CUDA.
        timeout: Limit of a collective.
        context_options: Communication of attention between context-parallel ranks.
        nccl_options: Options of the communicators on GPUs, by the name of the group.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        backend: str | None,
        timeout: timedelta,
        context_options: ContextOptions | None = None,
        nccl_options: Mapping[str, NcclOptions] | None = None,
    ) -> None:
        self._layout = layout
        self._nccl_options = nccl_options
        self._context_options = context_options
        self._backend = backend
        self._timeout = timeout
        self._context: ParallelContext | None = None
        self._alone: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._separated = False  # replicas draw random numbers of their own
        self.streams = ReplicaStreams(self._device)
        """Random streams of steps, and of hooks outside of steps."""
        self._is_alone = False  # after an exception on this rank alone
        self.course = Course()
        """Calls that all ranks make in the same order, for the failure watch."""
        self.failure_watch: FailureWatch | None = None
        """Ends this rank after a failure of another rank. None outside a run and on one rank."""

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _unconnected,
            (
                self._layout,
                self._backend,
                self._timeout,
                self._context_options,
                self._nccl_options,
            ),
        )

    # ---------------------------------------------------------------------------------- connections

    def connect(
        self,
        environment: ClusterEnvironment | None,
        world_size: int,
        device: torch.device,
        write_logs: Callable[[], None],
    ) -> bool:
        """Create the process groups, unless an earlier run has, and watch for failures.

        Args:
            environment: Knows the ranks.
            world_size: Ranks of the job.
            device: Device of this rank.
            write_logs: Called before another rank's failure ends this process.

        Returns:
            Whether groups were created.

        Raises:
            ConfigError: If this process is a rank of a job of another size.
        """
        self._device = device
        if world_size > 1 and environment is not None:
            self._join_world(environment, world_size)
            if self._context is not None and self._context.axis("world").is_broken:
                self._context = None  # of a run ended by an exception on all ranks
                self._is_alone = False
            unblock = None
            if restarts_in_process():
                unblock = partial(cut_connections, environment.main_port)
            self.course = Course()
            self.failure_watch = FailureWatch(
                write_logs=write_logs, unblock=unblock, course=self.course
            )
            # The watch runs before the first collective, which a failed rank would leave hanging.
            self.failure_watch.start()
        if self._context is not None:
            return False
        # From here on users draw the numbers of one device, under every start method.
        is_alone = world_size == 1
        states = random_states(include_cuda=False)
        set_random_states(states if is_alone else _broadcast(states))
        seed = int(os.environ.get("PL_GLOBAL_SEED", "1234"))
        self._context = ParallelContext(
            self._layout,
            device=device,
            seed=seed,
            context_options=self._context_options,
            timeout=self._timeout,
            alone=is_alone,
            nccl_options=self._nccl_options,
        )
        if not is_alone and self._context.dp.size == 1:
            # Lightning asks for a data-parallel group, and a missing group means all ranks to it.
            self._alone = dist.new_group(
                [dist.get_rank()],
                timeout=self._timeout,
                use_local_synchronization=True,
                group_desc="dp",
            )
        return True

    def _join_world(self, environment: ClusterEnvironment, world_size: int) -> None:
        """Create the default process group, unless an earlier Trainer has.

        A program may catch an exception of all ranks, after the exception has broken the
        connections, and train again. The job's store is still the same then, so each group has a
        number of its own.
        """
        if not dist.is_initialized():
            rank, size = environment.global_rank(), environment.world_size()
            url = f"tcp://{environment.main_address}:{environment.main_port}"
            store, *_ = next(rendezvous(url, rank, size, timeout=self._timeout))
            number = store.add(f"megatron_lightning/worlds/{rank}", 1)
            store = compat.PrefixStore(f"megatron_lightning/world/{number}", store)
            default = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
            init_process_group(
                environment, self._backend or default, store=store, timeout=self._timeout
            )
        if dist.get_world_size() != world_size:
            raise ConfigError(
                f"num_nodes x devices is {world_size}, and this process is already one of "
                f"{dist.get_world_size()} ranks that an earlier Trainer started. Set devices as it "
                "did, or to 1, or use another process."
            )

    def separate_replicas(self) -> None:
        """Seed each data-parallel replica differently, once: when training begins."""
        if not self._separated:
            self._separated = True
            self.streams = ReplicaStreams(self._device)
            # Context-parallel ranks draw alike: they skip the same layers (LayerDrop), and an
            # encoder that each of them runs on full rows is the same.
            self.streams.separate(self.context.dp.rank, self.context.dp.size)

    def current_watch(self) -> FailureWatch | None:
        """Return the watch for ending this rank after a failure of another rank. None outside a run
        and on one rank.
        """
        return self.failure_watch

    def abort(self) -> None:
        """Break this rank's connections, so that no rank waits for this rank."""
        if restarts_in_process() and "MASTER_PORT" in os.environ:
            cut_connections(int(os.environ["MASTER_PORT"]))
            if self._device.type != "cuda":
                return
        compat.abort_process_groups()

    def stop_watching(self) -> None:
        """End a run. Failures of other ranks no longer end this process."""
        if self.failure_watch is not None:
            self.failure_watch.stop()
            self.failure_watch = None

    @property
    def are_connected(self) -> bool:
        """Whether the groups exist."""
        return self._context is not None

    @property
    def context(self) -> ParallelContext:
        """Groups of this rank.

        Raises:
            ConfigError: Before the process groups exist.
        """
        if self._context is None:
            raise ConfigError(
                "the parallel context exists from the Trainer's setup on; use it in or after "
                "configure_model."
            )
        return self._context

    # ---------------------------------------------------------------------------------- collectives

    @property
    def are_several(self) -> bool:
        """Whether to communicate with other ranks. A Trainer of one device ignores ranks started by
        an earlier Trainer.
        """
        return self._context is not None and self._context.world_size > 1 and dist.is_initialized()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.are_several and not self._is_alone:
            self.course.mark("a barrier of the strategy")
            dist.barrier(device_ids=[self._device.index] if self._device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""
        if not self.are_several:
            return obj
        self.course.mark("a broadcast of the strategy")
        return _broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks, for the world too: ranks of one replica hold the
        same value.

        The mean of integers is not an integer: rounding would shift values logged with a
        ``batch_size``.
        """
        group = self.data_group if is_default(group) else group
        if not isinstance(tensor, Tensor) or group is None:
            return tensor
        self.course.mark("a reduction, as of self.log(sync_dist=True)", _ranks_of(group))
        if isinstance(reduce_op, str):
            name = reduce_op.upper()
            reduce_op = dist.ReduceOp.AVG if name == "MEAN" else getattr(dist.ReduceOp, name)
        if reduce_op != dist.ReduceOp.AVG:
            return _all_reduce(tensor, group, reduce_op)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.float()
        # Gloo has no mean.
        return _all_reduce(tensor, group).div_(dist.get_world_size(group))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel ranks, for the world too: the value of a replica counts
        once.

        Args:
            tensor: This rank's value [...], of the same shape on every rank.
            group: Communicator of the user's own. None, and the world: the data-parallel ranks.
            sync_grads: Whether a rank's gradient is the sum of all ranks' gradients of the rank's
                value, as needed by a loss over the samples of all ranks. Otherwise the values have
                no gradient.

        Returns:
            The values [ranks, ...]. On a single rank, ``tensor``.

        Raises:
            ConfigError: If context-parallel ranks have different values.
        """
        if not self.are_several:
            return tensor
        if is_default(group):
            axis = self.context.dp
            self._check_equal_over_context(tensor)
        else:
            axis = AxisGroup("user", _ranks_of(group), dist.get_rank(group), group)
        self.course.mark("all_gather of the module", axis.ranks)
        with nullcontext() if sync_grads else torch.no_grad():
            return gather_sequence(tensor.unsqueeze(0), axis, 0)

    def _check_equal_over_context(self, tensor: Tensor) -> None:
        """Refuse a value that differs between context-parallel ranks, since the ranks to count are
        unknown. A collective of the context-parallel ranks.
        """
        sharing = self.context.cp
        if sharing.size == 1:
            return
        values = gather_sequence(tensor.detach().unsqueeze(0), sharing).double()
        if not torch.allclose(values, values[:1], rtol=1e-5, atol=0.0, equal_nan=True):
            raise ConfigError(
                f"self.all_gather was given another value on each of the {sharing.size} "
                "context-parallel ranks, which hold parts of the same sequences, and gathers one "
                "value of each data-parallel rank. Pass "
                "group=self.trainer.strategy.context.dp_cp.process_group to gather the value of "
                "every part, or reduce the parts to one value before."
            )

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Communicator of the ranks with other samples. Exists on a single data-parallel rank too,
        since torch.distributed understands None as the world. None in one process.
        """
        return self.context.dp.process_group or self._alone

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The data- and context-parallel ranks, with different values outside of steps. None before
        the groups exist, and for a single rank.
        """
        return None if self._context is None else self._context.dp_cp.process_group

    def agree(self, decision: bool, all: bool = True) -> bool:
        """Agree over the world: control flow must be the same on every rank."""
        if not self.are_several:
            return decision
        self.course.mark("a decision of the strategy")
        votes = torch.tensor(int(decision), device=self._device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes > 0)

    def all_interrupted(self, state: str, within_s: float = 3.0) -> bool:
        """Return whether every rank calls this with the same ``state`` within ``within_s`` seconds.

        Not a collective, so that no rank can hang. After an exception on one rank only, callbacks
        handle the exception on this rank alone, and the other ranks end seconds after the report.
        Ctrl-C reaches all ranks. After a negative answer, :meth:`barrier` no longer waits.
        """
        arrived = 0
        self.course.end()
        if restarts_in_process():  # the next run continues from the last checkpoint
            self._is_alone = True
            return False
        if not dist.is_initialized():  # a failed run has taken the connections down
            self._is_alone = True
            return False
        with suppress(dist.DistError):  # rank 0, host of the store, has ended
            store = compat.default_store()
            attempt = store.add(f"megatron_lightning/interrupted/{self.context.rank}", 1)
            key = f"megatron_lightning/interrupted/attempt/{attempt}/{state}"
            arrived, deadline = store.add(key, 1), time.monotonic() + within_s
            while arrived < self.context.world_size and time.monotonic() < deadline:
                time.sleep(0.1)
                arrived = store.add(key, 0)
        self._is_alone = arrived < self.context.world_size
        return not self._is_alone


def is_default(group: Any) -> bool:
    """Whether ``group`` is the default process group, or None in its place."""
    return group is None or group == dist.group.WORLD


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _broadcast(obj: Any, src: int = 0) -> Any:
    box = [obj]
    dist.broadcast_object_list(box, src)
    return box[0]


def _unconnected(
    layout: ParallelLayout,
    backend: str | None,
    timeout: timedelta,
    context_options: ContextOptions | None,
    nccl_options: Mapping[str, NcclOptions] | None,
) -> ProcessGroups:
    return ProcessGroups(
        layout,
        backend=backend,
        timeout=timeout,
        context_options=context_options,
        nccl_options=nccl_options,
    )


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any = None) -> Tensor:
    """Reduce in place, by default to the sum. Lightning's own function calls a barrier first. Hosts
    would wait there in every step with ``sync_dist`` logging.
    """
    dist.all_reduce(tensor, dist.ReduceOp.SUM if op is None else op, group=group)
    return tensor
