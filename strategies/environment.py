"""Where a rank stands and how it talks to the others: the part of the strategy that knows nothing of models.

It checks the layout when the Trainer is constructed, sets global ranks, creates the process groups and answers Lightning's
collectives. Values that differ between ranks differ along the data-parallel axis only, so that is the default group; decisions
are taken by the whole world.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.grid import RankGrid
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.strategies import lightning_internals as internals
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.checkpoint_io import ShardedCheckpointIO
from megatron_lightning.strategies.failure import FailureWatch
from megatron_lightning.strategies.launchers import StartMethod, make_launcher


class MegatronEnvironment(ParallelStrategy):
    """Ranks, groups and collectives of one layout.

    Args:
        layout: Sizes of the parallel axes.
        start_method: How local ranks are started when no torchrun or Slurm did.
        process_group_backend: Backend of torch.distributed; None: gloo on CPU, NCCL (and gloo for CPU tensors) on CUDA.
        timeout_s: Seconds after which a collective that waits for another rank fails.
    """

    def __init__(
        self, layout: ParallelLayout, *, start_method: StartMethod, process_group_backend: str | None, timeout_s: float
    ) -> None:
        super().__init__()
        preflight.check_process_groups(process_group_backend, timeout_s)
        self.layout, self.start_method, self.num_nodes = layout, start_method, 1
        self._backend, self._timeout = process_group_backend, timedelta(seconds=timeout_s)
        self._context: ParallelContext | None = None
        self._failure_watch: FailureWatch | None = None
        self._alone = False  # an exception took this rank out of step with the others

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return (self.parallel_devices or [torch.device("cpu")])[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or [])

    @property
    def _planned_world_size(self) -> int:
        return self.num_nodes * max(1, self.num_processes)

    # A world of one asks no cluster environment: it may have been given by hand, outside of the job it describes.

    @property
    def global_rank(self) -> int:
        """Rank in the world."""
        return super().global_rank if self._planned_world_size > 1 else 0

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return super().local_rank if self._planned_world_size > 1 else 0

    @property
    def node_rank(self) -> int:
        """Which node this is."""
        return super().node_rank if self._planned_world_size > 1 else 0

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return super().world_size if self._planned_world_size > 1 else 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, so that Lightning hands ``sync_dist`` values to :meth:`reduce`."""
        return self._planned_world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas of the data and which one this rank sees."""
        if self._context is None:
            return {"num_replicas": self.layout.data_parallel_size(self._planned_world_size), "rank": 0}
        return {"num_replicas": self.context.dp.size, "rank": self.context.dp.rank}

    @property
    def context(self) -> ParallelContext:
        """Groups of this rank.

        Raises:
            ConfigError: Before the process groups exist.
        """
        if self._context is None:
            raise ConfigError("the parallel context exists from the Trainer's setup on; use it in or after configure_model.")
        return self._context

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.layout.num_stages

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes plain files: a plugin of the user's own, or ours."""
        if self._checkpoint_io is None:
            self._checkpoint_io = ShardedCheckpointIO()
        elif hasattr(self._checkpoint_io, "checkpoint_io"):
            self._checkpoint_io.checkpoint_io = ShardedCheckpointIO()  # of Lightning's wrappers, those with another keep it
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def user_checkpoint_io(self) -> CheckpointIO | None:
        """A checkpoint plugin of the user's own; None: checkpoints are sharded directories.

        Lightning's ``AsyncCheckpointIO`` around no other asks for sharded directories that are written in the background.
        """
        inner = self._checkpoint_io
        while isinstance(inner, AsyncCheckpointIO):
            inner = inner.checkpoint_io
        return None if inner is None or type(inner) is ShardedCheckpointIO else self._checkpoint_io

    @property
    def failure_watch(self) -> FailureWatch | None:
        """What ends this rank when another one fails; None outside a run and on one rank."""
        return self._failure_watch

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero utilities which rank this is."""
        if self.cluster_environment is not None and self._planned_world_size > 1:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self._planned_world_size)
        elif dist.is_initialized():
            return  # an earlier Trainer's ranks: those that were silent stay so
        # One function under two names in Lightning's packages; loggers and messages of rank 0 ask it.
        vars(rank_zero_only)["rank"] = vars(utilities_rank_zero_only)["rank"] = self.global_rank

    def _configure_launcher(self) -> None:
        RankGrid(self.layout, self._planned_world_size)  # a layout that does not fit fails here, before any process starts
        preflight.check_precision(self.precision_plugin, self._planned_world_size)
        preflight.check_checkpoint_io(self.user_checkpoint_io, self._planned_world_size)
        self._launcher = make_launcher(self)

    def check_before_launch(self, trainer: pl.Trainer | None, data: pl.LightningDataModule | None = None) -> None:
        """Check what is known of the module and the data before any process is started or group created.

        Args:
            trainer: Who launches, if it is known.
            data: The data module, if there is one.

        Raises:
            ConfigError: If the module cannot run under the layout.
        """

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule.

        Raises:
            ConfigError: Before the Trainer has connected one.
        """
        if self.lightning_module is None:
            raise ConfigError("no LightningModule is connected yet; pass one to trainer.fit, validate, test or predict.")
        return self.lightning_module

    def whole_module_state(self, folder: str) -> dict[str, Any] | None:
        """Return the module's state as one device has it, on the first rank of every node; all ranks call this after ``fit``.

        Args:
            folder: Where parts may lie for the time of this call; all nodes see it.

        Returns:
            None if this rank's own module is whole.
        """
        return None

    def setup_environment(self) -> None:
        """Create the process groups."""
        super().setup_environment()
        compat.silence_treespec_warning()
        if self.root_device.type == "cpu":
            compat.keep_freed_memory()
        self.set_world_ranks()
        if self._planned_world_size > 1 and self.cluster_environment is not None:
            default = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
            self._connect(self.cluster_environment, self._backend or default)
            self._check_world()
            if self._context is not None and self._context.axis("world").is_broken:
                self.forget_connections()
            self._failure_watch = FailureWatch(write_logs=self.write_logs)
            self._failure_watch.start()
            trainer = internals.attached_trainer(self.module)
            if trainer is not None:
                internals.note_sigterm(trainer)
        if self._context is None:
            # What users draw from here on is what one device would draw, however the ranks came to life.
            internals.set_random_states(self.broadcast(internals.random_states(include_cuda=False)))
            seed = int(os.environ.get("PL_GLOBAL_SEED", "1234"))
            alone = self._planned_world_size == 1
            self._context = ParallelContext(self.layout, device=self.root_device, seed=seed, timeout=self._timeout, alone=alone)
        if self.context.world_size > 1:
            internals.set_device_mesh(self.module, self.context.device_mesh())

    def _connect(self, environment: ClusterEnvironment, backend: str) -> None:
        """Create the default process group, unless an earlier Trainer has.

        A program may catch an exception that all ranks met, and that broke their connections, and go on. The job's store is
        still the same then, so each group has a number of its own.
        """
        if dist.is_initialized():
            return
        rank, size = environment.global_rank(), environment.world_size()
        url = f"tcp://{environment.main_address}:{environment.main_port}"
        store, *_ = next(rendezvous(url, rank, size, timeout=self._timeout))
        number = store.add(f"megatron_lightning/worlds/{rank}", 1)
        store = compat.PrefixStore(f"megatron_lightning/world/{number}", store)
        internals.init_process_group(environment, backend, store=store, timeout=self._timeout)

    def forget_connections(self) -> None:
        """Let go of the groups of a run that an exception on all ranks has ended."""
        self._context, self._alone = None, False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_context": None, "_failure_watch": None}

    def _check_world(self) -> None:
        """The ranks of an earlier Trainer in this process are there to stay."""
        if dist.get_world_size() != self._planned_world_size:
            raise ConfigError(
                f"num_nodes x devices is {self._planned_world_size}, and this process is already one of "
                f"{dist.get_world_size()} ranks that an earlier Trainer started. Set devices as it did, or to 1, or use "
                "another process."
            )

    @property
    def _connected(self) -> bool:
        """Whether there are other ranks to talk to; a Trainer of one device talks to none that an earlier one started."""
        return dist.is_initialized() and self._planned_world_size > 1

    def all_ranks_interrupted(self, state: str, within_s: float = 3.0) -> bool:
        """Return whether every rank calls this with the same ``state`` within ``within_s`` seconds.

        No collective, so that none can hang.

        An exception on one rank leaves it alone with what callbacks do about exceptions, and the others end seconds after its
        report; Ctrl-C reaches all ranks. From a negative answer on :meth:`barrier` does not wait.
        """
        arrived = 0
        if not dist.is_initialized():  # a run that failed has taken the connections down
            self._alone = True
            return False
        with suppress(dist.DistError):  # rank 0, which keeps the store, has ended
            store = compat.default_store()
            attempt = store.add(f"megatron_lightning/interrupted/{self.global_rank}", 1)
            key = f"megatron_lightning/interrupted/attempt/{attempt}/{state}"
            arrived, deadline = store.add(key, 1), time.monotonic() + within_s
            while arrived < self.context.world_size and time.monotonic() < deadline:
                time.sleep(0.1)
                arrived = store.add(key, 0)
        self._alone = arrived < self.context.world_size
        return not self._alone

    def end_if_left_alone(self) -> None:
        """End the job of an error that the tuner has caught on some ranks only; the others are still in the step.

        Raises:
            Exception: That error.
        """
        error = internals.caught_by_tuner()
        if error is None or self._failure_watch is None or self.all_ranks_interrupted("tuning"):
            return
        self._failure_watch.report(error)
        raise error

    def write_logs(self) -> None:
        """Let loggers write what they hold, before this process ends against its will."""
        module = self.lightning_module
        trainer = None if module is None else internals.attached_trainer(module)
        for logger in [] if trainer is None else trainer.loggers:
            with suppress(Exception):  # what ends the process is the news
                logger.finalize("failed")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self._connected and not self._alone:
            device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
            dist.barrier(device_ids=device_ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""
        if not self._connected:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks (not the world: ranks of one replica hold the same value).

        The mean of whole numbers is not a whole number: rounded, it would shift what is logged with a ``batch_size``.
        """
        if not isinstance(tensor, Tensor) or self._context is None:
            return tensor
        group = group if group is not None else self.context.dp.process_group
        if group is None:
            return tensor
        if reduce_op in ("mean", "avg", dist.ReduceOp.AVG) and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.float()
        return internals.all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel ranks."""
        group = group if group is not None else (self.context.dp.process_group if self._context else None)
        if group is None:
            return tensor.unsqueeze(0) if self._connected else tensor
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the world: control flow must be the same on every rank."""
        if not self._connected:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes > 0)
