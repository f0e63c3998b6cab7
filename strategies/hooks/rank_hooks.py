"""Lightning's questions about ranks, and Lightning's collectives. Shared by all parts of the
strategy.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.ranks import ProcessGroups, is_default
from megatron_lightning.launch.starts import Starts
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.progress import Progress
from megatron_lightning.strategies.run import Run

_GATHER_LATER = (
    "Keep what the step computes, as self.outputs.append(loss.detach()) does, and gather it at the "
    "end of the epoch. A loss over the samples of all ranks needs pipeline_model_parallel_size=1."
)


class RankHooks(ParallelStrategy):
    """The parts of the strategy by lifetime, and the ranks.

    Lightning's Trainer calls the overriding methods. ``MegatronStrategy`` has all other methods.
    """

    options: StrategyOptions
    """All settings of the user."""
    progress: Progress
    """Samples and steps counted."""
    ranks: ProcessGroups
    """Groups, collectives and failure watch."""
    run: Run | None
    """The fit, validate, test or predict running now, or the most recent run."""
    starts: Starts
    """Number of starts of this run, and the step of each start."""
    num_nodes: int
    """Machines of the job."""
    is_sized_by_launcher: bool
    """Whether torchrun, not the user, says how many ranks there are."""

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule.

        Raises:
            ConfigError: Before the Trainer has connected a module.
        """
        if self.lightning_module is None:
            raise ConfigError(
                "no LightningModule is connected yet; pass one to trainer.fit, validate, test or "
                "predict."
            )
        return self.lightning_module

    @property
    def part(self) -> Part:
        """Part of the module on this rank. Exists from ``configure_model`` on."""
        return self._running.part

    @property
    def _running(self) -> Run:
        if self.run is None:
            raise ConfigError("the strategy runs from the Trainer's setup on.")
        return self.run

    @property
    def layout(self) -> ParallelLayout:
        """Sizes of the parallel axes."""
        return self.options.layout

    @property
    def context(self) -> ParallelContext:
        """Groups of this rank. Exist from the Trainer's setup on."""
        return self.ranks.context

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks as a group of ``torch.distributed``, for collectives of your own:
        ``dist.all_reduce(x, group=self.trainer.strategy.data_parallel_group)``.

        A collective over all ranks would count the values of a replica once for every rank of the
        replica. The group exists from the Trainer's setup on. None in one process.
        """
        return self.ranks.data_parallel_group

    @property
    def executor(self) -> PipelineExecutor:
        """Runs the action tables of the pipeline. Exists after the strategy's setup."""
        return self._running.executor

    @property
    @override
    def root_device(self) -> torch.device:
        return (self.parallel_devices or [torch.device("cpu")])[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or [])

    @property
    def _planned_world_size(self) -> int:
        return self.num_nodes * max(1, self.num_processes)

    # With one rank the cluster environment is ignored: the user may have passed one outside
    # of the environment's job.

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._planned_world_size > 1 else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self._planned_world_size > 1 else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self._planned_world_size > 1 else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._planned_world_size > 1 else 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, so that Lightning hands ``sync_dist`` values to
        :meth:`reduce`.
        """
        return self._planned_world_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if not self.ranks.are_connected:
            return {
                "num_replicas": self.layout.data_parallel_size(self._planned_world_size),
                "rank": 0,
            }
        return {"num_replicas": self.context.dp.size, "rank": self.context.dp.rank}

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_in_step("a barrier")
        self.ranks.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_in_step("a broadcast")
        return self.ranks.broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_in_step("a decision of all ranks")
        return self.ranks.agree(decision, all)

    def _refuse_in_step(self, what: str, advice: str | None = None) -> None:
        if self.run is not None:
            self.run.refuse_in_step(what, advice)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self._refuse_uneven("a reduction, as by self.log(on_step=True, sync_dist=True),")
        return self.ranks.reduce(tensor, group, reduce_op)

    def _refuse_uneven(self, what: str) -> None:
        if self.run is not None:
            self.run.refuse_uneven(what)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel ranks, also for the world: the value of a replica counts
        once.

        Raises:
            PipelineError: In a step over several pipeline ranks.
            ConfigError: If context-parallel ranks have different values.
        """
        if is_default(group):
            self._refuse_in_step("self.all_gather", _GATHER_LATER)
            self._refuse_uneven("self.all_gather")
        return self.ranks.all_gather(tensor, group, sync_grads)
