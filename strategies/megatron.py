"""``Trainer(strategy=MegatronStrategy(...))``: tensor, sequence, pipeline and data parallel
training of ordinary modules.

The strategy has parts, by lifetime; Lightning's hooks are forwarded to them.

| attribute | lives as long as | what |
|---|---|---|
| ``options`` | the strategy | all that the user set (``options.py``) |
| ``progress`` | the strategy, and in checkpoints | samples and steps counted (``progress.py``) |
| ``ranks`` | the process groups | groups, collectives, failure watch (``launch/ranks.py``) |
| ``run`` | one fit, validate, test or predict | steps, gradients, checkpoints, undo (``run.py``) |

No loop, fetcher or callback of Lightning is patched; ``docs/architecture.md`` lists what is
replaced on other objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning import compat
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.plans import check_plan_choice
from megatron_lightning.checkpoint import plain_file
from megatron_lightning.checkpoint.requeue import committed_requeue
from megatron_lightning.checkpoint.saver import SaveReport
from megatron_lightning.config import (
    CheckpointOptions,
    CompileOptions,
    CompileScope,
    ContextOptions,
    DataParallel,
    DataParallelOptions,
    NonFinite,
    PipelineOptions,
    RecomputeOptions,
    StartMethod,
)
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.inference.engine import Engine
from megatron_lightning.inference.options import EngineOptions
from megatron_lightning.inference.own_generate import OwnGenerate
from megatron_lightning.inference.requests import Decode
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.optim.checks import (
    check_optimizers,
    check_stepped_tensors,
    explained_empty_optimizers,
)
from megatron_lightning.optim.gradients.data_groups import has_replicas
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.parallel.absent import AbsentListing, drop_absent
from megatron_lightning.parallel.context import GROUPS, ParallelContext
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.nccl import read_nccl_options
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.rules import (
    check_levels,
    check_options,
    check_process_groups,
    resolve_compile,
)
from megatron_lightning.strategies import lightning_internals as internals
from megatron_lightning.strategies.after_fit import path_of
from megatron_lightning.strategies.checkpoint.checkpoints import OptimizerHandle
from megatron_lightning.strategies.checkpoint.global_batch import keep_global_batch
from megatron_lightning.strategies.checkpoint.io import ShardedCheckpointIO, complete_io, users_io
from megatron_lightning.strategies.checks import preflight
from megatron_lightning.strategies.checks.connections import check_connections, gpu_capability
from megatron_lightning.strategies.checks.folders import check_folder_saving
from megatron_lightning.strategies.checks.namespaces import warn_of_other_namespace
from megatron_lightning.strategies.checks.plugins import check_layer_sync, check_storage_options
from megatron_lightning.strategies.launch.failures import AgreedStop
from megatron_lightning.strategies.launch.hooks import LaunchHooks
from megatron_lightning.strategies.launch.launcher import make_launcher
from megatron_lightning.strategies.launch.ranks import Ranks, is_default
from megatron_lightning.strategies.launch.restarts import Starts
from megatron_lightning.strategies.launch.stopping import handle_requeue
from megatron_lightning.strategies.launch.torchrun import sizes_of_torchrun
from megatron_lightning.strategies.module import describe_module
from megatron_lightning.strategies.options import StrategyOptions
from megatron_lightning.strategies.precision import megatron_plugin
from megatron_lightning.strategies.progress import Progress
from megatron_lightning.strategies.run import Run
from megatron_lightning.strategies.step.manual import unwrapped

_GATHER_LATER = (
    "Keep what the step computes, as self.outputs.append(loss.detach()) does, and gather it at the "
    "end of the epoch. A loss over the samples of all ranks needs pipeline_model_parallel_size=1."
)


class MegatronStrategy(ParallelStrategy):
    """Train an ordinary LightningModule with Megatron-style parallelism.

    World size is ``num_nodes x devices``; what the other axes leave is data parallel.

    Args:
        tensor_model_parallel_size: Ranks that share each layer's matrices.
        pipeline_model_parallel_size: Ranks that share the sequence of layers.
        virtual_pipeline_model_parallel_size: Model chunks on each pipeline rank.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that share the experts of a mixture-of-experts layer.
        expert_tensor_parallel_size: Ranks that share each expert's matrices; None: same as tensor.
        sequence_parallel: Shard activations along the sequence between tensor-parallel regions;
            "auto": where the plan shards the sequence.
        micro_batch_size: Samples of a micro-batch on one data-parallel rank; None: the whole batch
            is one micro-batch.
        pipeline_schedule: Order of work in the pipeline: "gpipe", "1f1b", "interleaved", "zb-h1" or
            "zbv"; "auto" picks by layout; or your own table: a CSV file, rows of actions, or the
            class path of a function that makes one.
        pipeline_options: How the model is partitioned into stages and how micro-batches visit them;
            None: layers are spread evenly.
        context_options: How attention sees sequences that context-parallel ranks share; None: the
            defaults.
        data_parallel: "ddp": all-reduce gradients; "zero1": shard the optimizer over the
            data-parallel ranks; "fsdp": shard gradients and parameters as well.
        data_parallel_options: Buckets, communication and optimizer state of the data-parallel
            ranks; None: the defaults.
        recompute: Activations that the backward pass computes again or reads from the host; None:
            all are kept on the device.
        compile: "block": compile the repeated blocks of the model with ``torch.compile``; None:
            compile nothing.
        compile_options: How they are compiled; None: the defaults.
        non_finite: Response to infinite or NaN losses and gradients: "raise" names the rank, the
            parameter and the micro-batch; "skip" skips the optimizer step; "ignore" does not look.
        start_method: How local ranks are started when no torchrun or Slurm did: "popen", "spawn" or
            "fork".
        sharding_plan: Tensor-parallel table by module path of the LightningModule, for a model that
            has no ``sharding_plan()`` of its own; "auto": split every linear layer by its output,
            and embeddings by rows.
        checkpoint_options: Saving in the background, and the response to a failed save; None: the
            defaults.
        process_group_backend: Backend of torch.distributed; None: gloo on CPU, NCCL (and gloo for
            CPU tensors) on CUDA.
        nccl_communicator_config_path: YAML file with options of NCCL for groups of ranks, such as
            ``tp: {max_ctas: 8}``; None: NCCL's defaults. CPUs ignore it.
        timeout_s: Seconds after which a collective that waits for another rank fails.

    Raises:
        ConfigError: If the values cannot work together; always before a process group exists.
    """

    strategy_name = "megatron"

    def __init__(  # noqa: PLR0917 (the public signature: Megatron's names, as few as a user meets)
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        sequence_parallel: bool | Literal["auto"] = "auto",
        micro_batch_size: int | None = None,
        pipeline_schedule: str | list[str] = "auto",
        pipeline_options: PipelineOptions | None = None,
        context_options: ContextOptions | None = None,
        data_parallel: DataParallel = "zero1",
        data_parallel_options: DataParallelOptions | None = None,
        recompute: RecomputeOptions | None = None,
        compile: CompileScope | None = None,
        compile_options: CompileOptions | None = None,
        non_finite: NonFinite = "ignore",
        start_method: StartMethod = "popen",
        sharding_plan: ShardingPlan | Literal["auto"] | None = None,
        checkpoint_options: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        nccl_communicator_config_path: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        layout = ParallelLayout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
        )
        warn_of_other_namespace()
        check_options(micro_batch_size, data_parallel, start_method, non_finite)
        check_plan_choice(sharding_plan)
        check_process_groups(process_group_backend, timeout_s)
        pipeline = pipeline_options or PipelineOptions()
        sequence = context_options or ContextOptions()
        check_levels(sequence, layout.cp)
        super().__init__()
        self.options = StrategyOptions(
            layout=layout,
            schedule=schedules.resolve(
                pipeline_schedule,
                num_ranks=layout.pp,
                num_chunks=layout.vpp,
                microbatch_group_size=pipeline.microbatch_group_size_per_vp_stage,
            ),
            micro_batch_size=micro_batch_size,
            pipeline=pipeline,
            sequence=sequence,
            data_parallel=data_parallel,
            data=data_parallel_options or DataParallelOptions(),
            recompute=recompute or RecomputeOptions(),
            compile=resolve_compile(compile, compile_options),
            non_finite=non_finite,
            checkpoint=checkpoint_options or CheckpointOptions(),
            sharding_plan=sharding_plan,
            start_method=start_method,
            timeout=timedelta(seconds=timeout_s),
        )
        self.progress = Progress()
        self.ranks = Ranks(
            layout,
            backend=process_group_backend,
            timeout=self.options.timeout,
            context_options=self.options.sequence,
            nccl_options=None
            if nccl_communicator_config_path is None
            else read_nccl_options(nccl_communicator_config_path, GROUPS),
        )
        self.run: Run | None = None
        self.starts = Starts()
        """How often this run was started, from which steps."""
        self.num_nodes = 1
        self.is_sized_by_launcher = False
        """Whether torchrun, not the user, says how many ranks there are."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"run": None}

    # ---------------------------------------------------------------------------------------- ranks

    @property
    def layout(self) -> ParallelLayout:
        """Sizes of the parallel axes."""
        return self.options.layout

    @property
    def context(self) -> ParallelContext:
        """Groups of this rank; they exist from the Trainer's setup on."""
        return self.ranks.context

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks as a group of ``torch.distributed``, for collectives of your own:
        ``dist.all_reduce(x, group=self.trainer.strategy.data_parallel_group)``.

        A collective over all ranks would count the values of a replica as often as it has ranks.
        The group exists from the Trainer's setup on; None in one process.
        """
        return self.ranks.data_parallel_group

    @property
    def executor(self) -> PipelineExecutor:
        """Runs the action tables of the pipeline; exists after the strategy's setup."""
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

    # With one rank the cluster environment is ignored: the user may have passed one outside of the
    # job it describes.

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

    # --------------------------------------------------------------------------------------- launch

    @override
    def _configure_launcher(self) -> None:
        self._take_sizes_of_torchrun()
        world_size = self._planned_world_size
        preflight.check_trainer(
            self.options,
            world_size,
            self.precision_plugin,
            users_io(self._checkpoint_io),
            self.root_device,
        )
        check_layer_sync(
            self._layer_sync, self.root_device, self.layout.data_parallel_size(world_size)
        )
        hooks = LaunchHooks(
            before_launch=self._check_before_launch,
            prepare_logs=self.starts.prepare,
            note_checkpoint=self._note_checkpoint,
            failure_watch=self.ranks.current_watch,
            write_logs=self._write_logs,
            full_module_state=self.full_module_state,
        )
        num_processes = max(1, self.num_processes)
        self._launcher = make_launcher(
            self,
            self.options.start_method,
            hooks,
            num_processes=num_processes,
            num_nodes=self.num_nodes,
        )

    def _note_checkpoint(self, trainer: pl.Trainer | None, path: str) -> None:
        if trainer is not None and isinstance(self.lightning_module, FolderModule):
            chosen = internals.chosen_checkpoint(trainer, path)
            self.lightning_module.loads_from = chosen and committed_requeue(chosen)

    def _take_sizes_of_torchrun(self) -> None:
        sizes = sizes_of_torchrun(self.cluster_environment)
        if sizes is None:
            return
        num_devices, self.num_nodes = sizes
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            self.parallel_devices = [torch.device("cpu")] * num_devices
        elif len(devices) >= num_devices:
            self.parallel_devices = devices[:num_devices]
        self.is_sized_by_launcher = True

    def _check_before_launch(
        self, trainer: pl.Trainer | None, data: pl.LightningDataModule | None
    ) -> None:
        if self.lightning_module is None:
            return
        world_size, in_background = self._planned_world_size, self.saves_in_background
        preflight.check_before_launch(self.options, world_size, self.module, trainer, data)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        has_plugin = users_io(self._checkpoint_io) is not None
        check_folder_saving(self.options.checkpoint, self.module, trainer, has_plugin=has_plugin)
        if not has_plugin:
            preflight.check_saving(
                self.options, world_size, self.module, trainer, in_background=in_background
            )

    def _write_logs(self) -> None:
        """Finalize the loggers before this process is ended from outside."""
        module = self.lightning_module
        trainer = None if module is None else internals.attached_trainer(module)
        for logger in [] if trainer is None else trainer.loggers:
            with suppress(Exception):  # the error that ends the process matters more
                logger.finalize("failed")

    def full_tensors(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of every parameter and saved buffer, one at a time, on every
        rank; during a run and after it.

        A collective: all ranks call it, and take all tensors. No rank has more than its part and
        one full tensor. Tied copies come under each of their names.

        Args:
            module: A sub-module of the LightningModule, whose own names are given then; None: all.

        Raises:
            ConfigError: If ``module`` is no part of the LightningModule.
            PipelineError: In a step, over several pipeline ranks.
        """
        if self.run is None:  # in the process that has started the ranks, the module is full
            root = self.module
            prefix = f"{path_of(root, module)}." if module not in {None, root} else ""
            state = {n: t for n, t in root.state_dict().items() if isinstance(t, Tensor)}
            return ((n[len(prefix) :], t) for n, t in state.items() if n.startswith(prefix))
        return self.run.full_state(module).tensors()

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """Return the module's state as one device has it, on the CPU, on rank 0, and an empty dict
        on the others; during a run and after it.

        A collective: all ranks call it. For arguments and errors see :meth:`full_tensors`.
        """
        if self.run is None:
            root = self.module if module is None else module
            path_of(self.module, root)
            return dict(root.state_dict())
        return self.run.full_state(module).collect(keeps=self.is_global_zero)

    def export_hf_weights(
        self, module: nn.Module | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of the tensors of the Hugging Face folder that a model came from,
        one at a time, on every rank's device; during a run and after it.

        A collective: all ranks call it, and take all tensors.

        Args:
            module: A model in the LightningModule; None: the first that came from a folder.
            dtype: Dtype of floating tensors; None: the folder's.

        Raises:
            ConfigError: If the model did not come from a folder.
            PipelineError: In a step, over several pipeline ranks.
        """
        return self._running.live_folder(module, dtype).weights()

    def save_hf_pretrained(
        self,
        path: str | os.PathLike[str],
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a model as a Hugging Face folder, with files, names, dtypes, configuration and
        tokenizer of the folder that the model came from. It appears in one rename.

        A collective: all ranks call it, and each writes some of the files. For ``module``,
        ``dtype`` and errors see :meth:`export_hf_weights`.

        Args:
            path: The folder, on a file system that all ranks share.
            module: See above.
            dtype: See above.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: On every rank, if the target exists, or a rank failed.
        """
        self._running.live_folder(module, dtype).write(Path(path), overwrite=overwrite)

    def full_module_state(self) -> dict[str, Any] | None:
        """Return :meth:`full_state_dict` on the first rank of every node; all ranks call this.

        Returns:
            None if this rank's own module is full.
        """
        return self._running.full_module_state(keeps=self.local_rank == 0)

    # ---------------------------------------------------------------------------------------- setup

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule.

        Raises:
            ConfigError: Before the Trainer has connected one.
        """
        if self.lightning_module is None:
            raise ConfigError(
                "no LightningModule is connected yet; pass one to trainer.fit, validate, test or "
                "predict."
            )
        return self.lightning_module

    def describe(self, module: pl.LightningModule) -> str:
        """Return a table of the module's layers under this strategy: stage, style, local shapes and
        axes of each.

        It needs no Trainer and no process groups. The module keeps its layers, or still builds them
        in ``configure_model``.

        Raises:
            ConfigError: If the module does not fit the layout.
        """
        return describe_module(module, self.options)

    @property
    def part(self) -> Part:
        """Part of the module on this rank; exists from ``configure_model`` on."""
        return self._running.part

    @property
    def _running(self) -> Run:
        if self.run is None:
            raise ConfigError("the strategy runs from the Trainer's setup on.")
        return self.run

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        compat.silence_treespec_warning()
        if self.root_device.type == "cpu":
            compat.keep_freed_memory()
        capability = gpu_capability(self.root_device)
        check_connections(self.layout, self.options.data_parallel, capability)
        self._set_world_ranks()
        is_new = self.ranks.connect(
            self.cluster_environment, self._planned_world_size, self.root_device, self._write_logs
        )
        if is_new and self.run is not None:
            self.run.forget_part()
        trainer = internals.attached_trainer(self.module)
        if self.ranks.failure_watch is not None and trainer is not None:
            internals.note_sigterm(trainer)
        if self.context.world_size > 1:
            internals.set_device_mesh(self.module, self.context.device_mesh())
        self.run = Run(
            self.module,
            self.ranks,
            self.options,
            self.progress,
            ranks_per_node=max(1, self.num_processes),
            layer_sync=self._layer_sync,
            previous=self.run,
        )
        if trainer is not None:
            handle_requeue(trainer, self.run.undo)

    def _set_world_ranks(self) -> None:
        """Set the rank in the cluster environment and in Lightning's rank-zero utilities."""
        if self.cluster_environment is not None and self._planned_world_size > 1:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self._planned_world_size)
        elif dist.is_initialized():
            return  # an earlier Trainer's ranks: those that were silent stay so
        # One function under two names in Lightning's packages; loggers and messages of rank 0 ask
        # it.
        vars(rank_zero_only)["rank"] = vars(utilities_rank_zero_only)["rank"] = self.global_rank

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        run, fitting = self._running, trainer.state.fn == TrainerFn.FITTING
        run.begin_setup(trainer)
        preflight.check_at_setup(self.options, self.context.world_size, self.module, trainer)
        run.place(self.precision_plugin)
        run.connect_pipeline(fitting=fitting)
        run.report_attention(self.precision_plugin, fitting=fitting)
        run.compile_blocks()
        self.barrier()
        if fitting:
            self._setup_optimizers(trainer)
        self.setup_precision_plugin()  # replaces Lightning's wrappers of the optimizers
        if fitting:
            run.checkpoints.check_folders()
            run.begin_training(self.optimizers, self.lr_scheduler_configs, self.precision_plugin)
        run.begin_steps(self.precision_plugin)
        if fitting and not self.options.data.optimizer_cpu_offload:
            internals.optimizers_to_device(self.optimizers, self.root_device)

    def _setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers, and check that they can step what the ranks hold."""
        self.progress.begin()
        self.ranks.separate_replicas()
        self._reset_optimizers_and_schedulers()
        with explained_empty_optimizers(self.layout, self.context.pp.rank):
            self._configure_optimizers(trainer)
        sharded = self.options.data_parallel != "ddp" and has_replicas(self.context)
        sharded = sharded or self.layout.model_parallel_size > 1
        size, world_size = self.options.micro_batch_size, self.context.world_size
        check_optimizers(self.optimizers, size, world_size, self.options.data, sharded=sharded)
        check_stepped_tensors(self.optimizers, self.module)

    def _configure_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers. Code that goes by positions sees the parameters of all stages."""
        if self.layout.pp == 1:
            self.setup_optimizers(trainer)
            return
        trained = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            with AbsentListing(self.module).shown():
                self.setup_optimizers(trainer)
        except ShardingError:  # something computes with all parameters, and means the rank's own
            if any(p.requires_grad is not requires_grad for p, requires_grad in trained):
                raise  # what it froze by positions would be others the second time
            self.setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for member in members(optimizer) if isinstance(optimizer, Optimizer) else ():
                drop_absent(member)

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, or its counterpart that is right on several ranks."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else megatron_plugin(plugin)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self.run is not None and device is None:
            batch = self.run.copies.copy(batch, self.module)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._running.process_dataloader(dataloader)

    # ---------------------------------------------------------------------------------------- steps

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.ranks.streams.in_step():
            return self._running.steps.training_step(batch, *args, *kwargs.values())

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", *args, *kwargs.values())

    def _evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        if self._running.has_trained:
            self._running.training.accumulation.written.before_evaluation()
        self.wait_for_parameters()
        # Lightning restores the state of hooks after a sanity check.
        with self.ranks.streams.in_step(isolated=self.module.trainer.sanity_checking):
            if self.part.units is not None and torch.is_inference_mode_enabled():
                # Parameters gathered in inference mode could not be trained.
                with torch.inference_mode(False), torch.no_grad():
                    return self._running.steps.run_evaluation(hook, batch, *indices)
            return self._running.steps.run_evaluation(hook, batch, *indices)

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a part of a step on every micro-batch; see
        :func:`megatron_lightning.strategies.run_pipeline`.
        """
        return self._running.steps.run_pipeline(fn, batch)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Make the reduced gradients the parameters' own, between Lightning's backward hooks."""
        run, module = self._running, self.module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.ranks.streams.in_step():
            run.steps.backward(closure_loss, optimizer, *args, **kwargs)
        run.training.accumulation.finish_run()
        with self.ranks.streams.in_hook(), run.training.guard.around("on_after_backward"):
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        run.training.watch_gradients()
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def step(closure: Callable[[], Any]) -> Any:
            return super(MegatronStrategy, self).optimizer_step(optimizer, closure, model, **kwargs)

        with self.ranks.streams.in_hook():  # that a module steps inside of its training_step
            return self._running.training.optimizer_step(step, closure)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._running.training.accumulation.accumulating():
            yield

    @override
    def on_train_start(self) -> None:
        """Resume an interrupted epoch: with the data order and the random numbers it would have
        had.
        """
        self.starts.begin(self.module.trainer)
        keep_global_batch(
            self.module.trainer,
            self._running.checkpoints.state.step_size,
            self.context.dp.size,
            is_sized_by_launcher=self.is_sized_by_launcher,
        )
        self._running.checkpoints.state.restore_position(self.module.trainer)
        self._running.steps.begin_training()
        self._running.training.keep_codes()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 or self._running.training.accumulation.written.is_due:
            self._running.check_draws()
        self._running.clock.agree(self.module.trainer)
        self.starts.beat(self.module.trainer)

    @override
    def on_validation_start(self) -> None:
        self._running.share_written()
        self._running.share_buffers()
        self._running.begin_evaluation("validation_step")
        self._running.check_replicas()

    @override
    def on_test_start(self) -> None:
        self._running.share_written()
        self._running.begin_evaluation("test_step")

    @override
    def on_predict_start(self) -> None:
        self._running.share_written()
        self._running.begin_evaluation("predict_step")

    @override
    def on_validation_end(self) -> None:
        self._running.expect_writes()

    @override
    def on_train_end(self) -> None:
        self.starts.end(self.module.trainer)
        self._running.steps.end_training()
        self._running.share_written()
        self._running.training.accumulation.gather.drop_codes()
        self._running.share_buffers()
        self._running.check_replicas()

    # ----------------------------------------------------------------------------------------- text

    def engine(
        self,
        options: EngineOptions | None = None,
        *,
        model: nn.Module | None = None,
        stops: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> Engine | OwnGenerate:
        """Return an engine that continues and scores texts by the weights of this run, outside of
        steps; it exists after the strategy's setup.

        All ranks of a replica call it with the same texts. Training goes on as if it had not been
        called, and memory for keys is given back after each call. A model of ``transformers``
        writes by its own ``generate``.

        Args:
            options: Sizes; None: the defaults.
            model: The model in the LightningModule; None: the only one.
            stops: Token ids that end a text.
            decode: Returns the text of token ids; needed for stop strings.

        Raises:
            ConfigError: If there is no such model, or several, or it cannot write text on this
                layout.
        """
        return self._running.engine(
            self.precision_plugin, model=model, options=options, stops=stops, decode=decode
        )

    # ------------------------------------------------------------------------------------ gradients

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because a gradient was not finite."""
        return self.progress.skipped_steps

    @property
    def consumed_samples(self) -> int:
        """Samples that all data-parallel ranks together have trained on, those of skipped steps
        included.
        """
        return self.progress.consumed_samples

    @property
    def may_skip_steps(self) -> bool:
        """Whether optimizer steps are skipped when something is not finite."""
        return (
            self.options.non_finite == "skip"
            or getattr(self.precision_plugin, "loss_scale", None) is not None
        )

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last step that clipped by norm; None where
        Lightning clips by itself.
        """
        return (
            self.run.training.norms.last_norm
            if self.run is not None and self.run.has_trained
            else None
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients that the optimizer reads, by global name (this rank's
        shards).
        """
        has_trained = self.run is not None and self.run.has_trained
        return self._running.training.accumulation.reducer.gradients() if has_trained else {}

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients over every axis, as they are now; a collective."""
        return self._running.training.norms.norm()

    def gradient_group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the 2-norm of the gradients of every parameter group, by its name or number; a
        collective.
        """
        return self._running.training.norms.group_norms(unwrapped(optimizer))

    def num_zero_gradients(self) -> Tensor:
        """Return how many elements of the gradients are zero, over every axis; a collective."""
        return self._running.training.norms.zero_count()

    def wait_for_parameters(self) -> None:
        """Wait until the weights are those of the last step on every rank; needed with
        ``overlap_param_gather`` only.
        """
        if self.run is not None and self.run.has_trained:
            self.run.training.accumulation.gather.wait()

    # ---------------------------------------------------------------------------------- checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that reads and writes plain files: the user's own, or ours."""
        self._checkpoint_io = complete_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def _saves_plain_files(self) -> bool:
        """Whether checkpoints are Lightning's own: with a plugin of the user's, and in a process
        that has no ranks (yet).
        """
        return self.run is None or users_io(self._checkpoint_io) is not None

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def last_save(self) -> SaveReport | None:
        """Cost of the last checkpoint on this rank: seconds that training waited, seconds until it
        was committed, bytes.
        """
        return None if self.run is None else self.run.checkpoints.saver.last

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training continues."""
        return self.options.checkpoint.async_save or isinstance(
            self._checkpoint_io, AsyncCheckpointIO
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the module's state."""
        return self.module.state_dict() if self.run is None else self.run.module_state()

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return a handle of the optimizer's state, which :meth:`save_checkpoint` writes by global
        name.
        """
        if self._saves_plain_files:
            return super().optimizer_state(optimizer)
        return OptimizerHandle(
            unwrapped(optimizer), self._running.training.accumulation.view(unwrapped(optimizer))
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a sharded checkpoint directory; a checkpoint plugin of the user's own gets
        Lightning's dict instead.
        """
        if self.run is not None:
            self._refuse_in_step("a checkpoint")
            self.run.share_written()
        if self._saves_plain_files:
            if self.run is not None:
                checkpoint = self.run.checkpoints.state.write_to(checkpoint, self.module, self.part)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        check_storage_options(storage_options)
        background = self.saves_in_background
        self._running.checkpoints.save(checkpoint, str(filepath), self.part, background=background)

    def save_local_copy(self, filepath: str, folder: str) -> None:
        """Keep every rank's state on its node's own disk and on the next node's, in the background;
        all ranks call this.

        Args:
            filepath: The pointer on the shared file system that leads to the copies; ``ckpt_path``
                for resuming from them.
            folder: Folder on each node; ``{node_rank}`` in it represents the node's number.

        Raises:
            CheckpointError: On every rank, if this save, or the one before, failed on one of them
                and ``on_save_error`` is "raise"; older copies are intact.
        """
        self._refuse_in_step("a checkpoint")
        self._running.share_written()
        self._running.checkpoints.save_local(filepath, folder, self.part)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read this rank's part of a checkpoint of any layout, or of a plain Lightning checkpoint
        file.
        """
        if self.run is None:  # asked before the Trainer's setup: the module is full
            full: dict[str, Any] = ShardedCheckpointIO().load_checkpoint(
                checkpoint_path, weights_only=weights_only
            )
            return full
        if self._saves_plain_files:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            self.run.checkpoints.state.read_from(checkpoint, self.module)
            return checkpoint
        self.run.assemble()
        # Lightning calls this before setup, and nothing can be read to ``meta``.
        if self.options.data_parallel == "fsdp":
            self.run.place(self.precision_plugin)
        return self.run.checkpoints.load(
            self.broadcast(committed_requeue(str(checkpoint_path))), self.part
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the full tensors that ``checkpoint["state_dict"]`` names."""
        if self.run is None or self._saves_plain_files:
            super().load_model_state_dict(checkpoint, strict)
            return
        self.run.assemble()
        self.run.checkpoints.load_model(checkpoint, self.part, strict=strict)
        self.run.accept_equal_shards()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the optimizer states."""
        if self.run is not None:
            self.run.training.follow_restored_groups()
        if not self._saves_plain_files:
            views = [
                self._running.training.accumulation.view(optimizer) for optimizer in self.optimizers
            ]
            self._running.checkpoints.load_optimizers(checkpoint, views, self.part)
            return
        super().load_optimizer_state_dict(checkpoint)
        if self.run is not None:
            self.run.checkpoints.state.restore_random_state()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, as soon as a newer one is committed."""
        if self._saves_plain_files:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._running.checkpoints.saver.remove(str(filepath))

    def finish_saving(self) -> None:
        """Wait until the save in the background, if there is one, is committed.

        Raises:
            CheckpointError: If it failed and ``on_save_error`` is "raise".
        """
        if self.run is not None:
            self.run.checkpoints.saver.finish()

    # ------------------------------------------------------------------------------------- teardown

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Break this rank's connections, so that no rank waits for it; the launcher has told the
        others why.
        """
        trainer = None if self.lightning_module is None else internals.attached_trainer(self.module)
        if trainer is not None:
            self.starts.end(trainer)
        if self.run is not None:
            # The other ranks' threads write their shards of it.
            self.run.checkpoints.saver.finish_quietly()
        if self.ranks.failure_watch is not None and not isinstance(exception, AgreedStop):
            compat.abort_process_groups()

    @override
    def teardown(self) -> None:
        """Undo what the run has replaced, after the last save is committed; the module stays where
        it is.
        """
        with ExitStack() as last_first:
            for owner in (self.accelerator, self.cluster_environment, self.precision_plugin):
                if owner is not None:
                    last_first.callback(owner.teardown)
            if users_io(self._checkpoint_io) is not None:
                last_first.callback(self.checkpoint_io.teardown)
            last_first.callback(self.ranks.stop_watching)
            if self.run is not None:
                last_first.callback(self.run.undo.close)
            self.finish_saving()
            if self.run is not None and self.module.trainer.state.status == TrainerStatus.RUNNING:
                self._finish_fit(self.run)

    def _finish_fit(self, run: Run) -> None:
        trainer = self.module.trainer
        if trainer.state.fn == TrainerFn.FITTING and users_io(self._checkpoint_io) is None:
            run.checkpoints.finish_fit()


internals.read_folders(plain_file)
StrategyRegistry.register(
    "megatron", MegatronStrategy, description="Megatron-style parallelism", override=True
)
