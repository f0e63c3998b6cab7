"""``Trainer(strategy=MegatronStrategy(...))``: tensor, sequence, pipeline and data parallel
training of ordinary modules.

The strategy has parts, by lifetime. Files by theme forward Lightning's hooks to these parts.

| attribute | lives as long as | content |
|---|---|---|
| ``options`` | the strategy | all settings of the user (``options.py``) |
| ``progress`` | the strategy, and in checkpoints | samples and steps counted (``progress.py``) |
| ``ranks`` | the process groups | groups, collectives, failure watch (``launch/ranks.py``) |
| ``run`` | one fit, validate, test or predict | steps, gradients, checkpoints, undo (``run.py``) |

| base class | forwards |
|---|---|
| ``rank_hooks.py`` | questions about ranks, and collectives |
| ``setup_hooks.py`` | all before the first batch |
| ``step_hooks.py`` | batches, optimizer steps, gradients for users |
| ``checkpoint_hooks.py`` | saving and loading, the full model for users |

No loop, fetcher or callback of Lightning is patched. ``docs/architecture.md`` lists all
replacements on other objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from megatron_lightning.assembly.state.left_out import load_beside
from megatron_lightning.checkpoint import plain_file
from megatron_lightning.checkpoint.format.class_paths import check_classes
from megatron_lightning.checkpoint.requeue import committed_requeue
from megatron_lightning.config import (
    CheckpointOptions,
    CompileOptions,
    CompileScope,
    ContextOptions,
    DataParallel,
    DataParallelOptions,
    GuardMode,
    GuardOptions,
    NonFinite,
    PipelineOptions,
    RecomputeOptions,
    StartMethod,
    StrategySettings,
)
from megatron_lightning.launch.hooks import LaunchHooks
from megatron_lightning.launch.launcher import make_launcher
from megatron_lightning.launch.ranks import ProcessGroups
from megatron_lightning.launch.starts import Starts
from megatron_lightning.launch.torchrun import sizes_of_torchrun
from megatron_lightning.lightning_internals.checkpoints import chosen_checkpoint, read_folders
from megatron_lightning.lightning_internals.trainer import attached_trainer
from megatron_lightning.names.answered_arguments import answering_other_names
from megatron_lightning.parallel.grid.context import GROUPS
from megatron_lightning.parallel.grid.nccl import read_nccl_options
from megatron_lightning.parallel.shards.sharding import ShardingPlan
from megatron_lightning.step.agreed_stop import AgreedStop
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.progress import Progress
from megatron_lightning.strategies.checkpoint.io import users_io
from megatron_lightning.strategies.checks import preflight
from megatron_lightning.strategies.checks.folders import check_folder_saving
from megatron_lightning.strategies.checks.kinds import is_folder_module
from megatron_lightning.strategies.checks.namespaces import warn_of_other_namespace
from megatron_lightning.strategies.checks.plugins import check_layer_sync
from megatron_lightning.strategies.hooks.checkpoint_hooks import CheckpointHooks
from megatron_lightning.strategies.hooks.setup_hooks import SetupHooks
from megatron_lightning.strategies.hooks.step_hooks import StepHooks
from megatron_lightning.strategies.run import Run


class MegatronStrategy(SetupHooks, StepHooks, CheckpointHooks):
    """Train an ordinary LightningModule with Megatron-style parallelism.

    World size is ``num_nodes x devices``. Ranks beyond the product of the other axes are data
    parallel.

    Args:
        tensor_model_parallel_size: Ranks sharing each layer's matrices.
        pipeline_model_parallel_size: Ranks over which the sequence of layers is partitioned.
        virtual_pipeline_model_parallel_size: Model chunks on each pipeline rank.
        context_parallel_size: Ranks over which each sequence is split.
        expert_model_parallel_size: Ranks sharing the experts of a mixture-of-experts layer.
        expert_tensor_parallel_size: Ranks over which each expert's matrices are sharded. None: same
            as tensor.
        sequence_parallel: Shard activations along the sequence between tensor-parallel regions.
            "auto": if the plan shards the sequence.
        micro_batch_size: Samples of a micro-batch on one data-parallel rank. None: the whole batch
            is one micro-batch.
        pipeline_schedule: Order of work in the pipeline: "gpipe", "1f1b", "interleaved", "zb-h1" or
            "zbv". "auto" picks by layout. A table of your own: a CSV file, rows of actions, or the
            class path of a function returning rows.
        pipeline_options: Partition of the model into stages, and order of micro-batches. None:
            layers are spread evenly.
        context_options: Attention over sequences split by context-parallel ranks. None: the
            defaults.
        data_parallel: "ddp": all-reduce gradients. "zero1": shard the optimizer over the
            data-parallel ranks. "fsdp": shard gradients and parameters as well.
        data_parallel_options: Buckets, communication and optimizer state of the data-parallel
            ranks. None: the defaults.
        recompute: Activations to recompute in the backward pass or to read from the host. None:
            keep all activations on the device.
        compile: "block": compile the repeated blocks of the model with ``torch.compile``. None:
            compile nothing.
        compile_options: Options of the compiler. None: the defaults.
        fused_loss: Compute the loss of untouched ``transformers`` models, called with ``labels``,
            in chunks of tokens, so that the logits of all tokens exist only if code reads them
            (on all tensor-parallel ranks). False: compute logits first.
        non_finite: Response to infinite or NaN losses and gradients: "raise" names the rank, the
            parameter and the micro-batch. "skip" skips the optimizer step. "ignore" does not look.
        guards: Response to mistakes in your code that losses would not show (docs/differences.md):
            "refuse" raises an error, "warn" warns once, "ignore" does not look. GuardOptions names
            single guards to ignore.
        start_method: How local ranks are started when no torchrun or Slurm did: "popen", "spawn" or
            "fork".
        sharding_plan: Tensor-parallel table by module path of the LightningModule, for a model
            without a ``sharding_plan()`` of its own. "auto": split every linear layer by its
            output, and embeddings by rows.
        checkpoint_options: Saving in the background, and the response to a failed save. None: the
            defaults.
        process_group_backend: Backend of torch.distributed. None: gloo on CPU, NCCL (and gloo for
            CPU tensors) on CUDA.
        nccl_communicator_config_path: YAML file with options of NCCL for groups of ranks, such as
            ``tp: {max_ctas: 8}``. None: NCCL's defaults. CPUs ignore it.
        timeout_s: Seconds of waiting for another rank before a collective fails.

    Raises:
        ConfigError: If the values cannot work together. Raised before a process group exists.
    """

    strategy_name = "megatron"

    @answering_other_names
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
        fused_loss: bool = True,
        non_finite: NonFinite = "ignore",
        guards: GuardMode | GuardOptions = "refuse",
        start_method: StartMethod = "popen",
        sharding_plan: ShardingPlan | Literal["auto"] | None = None,
        checkpoint_options: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
        nccl_communicator_config_path: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        settings = StrategySettings(**_arguments(locals()))
        warn_of_other_namespace()
        # Everything that sizes alone decide is refused here, before a Trainer or a process exists.
        options = StrategyOptions.of(settings)
        super().__init__()
        self.options = options
        self.progress = Progress()
        self.ranks = ProcessGroups(
            options.layout,
            backend=process_group_backend,
            timeout=options.timeout,
            context_options=options.sequence,
            nccl_options=None
            if nccl_communicator_config_path is None
            else read_nccl_options(nccl_communicator_config_path, GROUPS),
        )
        self.run = None
        self.starts = Starts(self.progress)
        self.num_nodes = 1
        self.is_sized_by_launcher = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"run": None}

    # --------------------------------------------------------------------------------------- launch

    @override
    def _configure_launcher(self) -> None:
        # First, since torchrun may have started another number of ranks than the Trainer was told.
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
        self.starts.note_checkpoint(path)
        module = self.lightning_module
        if trainer is not None and is_folder_module(module):
            chosen = chosen_checkpoint(trainer, path)
            module.loads_from = chosen and committed_requeue(chosen)

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

    # ------------------------------------------------------------------------------------- teardown

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Break this rank's connections, so that no rank waits for this rank. The launcher has told
        the other ranks why.
        """
        trainer = None if self.lightning_module is None else attached_trainer(self.module)
        if trainer is not None:
            self.starts.end(trainer)
        if self.run is not None:
            # Threads of the other ranks still write shards of the checkpoint.
            self.run.checkpoints.saver.finish_quietly()
        if self.ranks.failure_watch is not None and not isinstance(exception, AgreedStop):
            self.ranks.abort()

    @override
    def teardown(self) -> None:
        """Undo all replacements of the run, after the last save is committed. The module stays on
        the device.
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


def _arguments(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among the local names of the constructor."""
    return {name: value for name, value in names.items() if name not in ("self", "__class__")}


read_folders(plain_file, check_classes, load_beside)
StrategyRegistry.register(
    "megatron", MegatronStrategy, description="Megatron-style parallelism", override=True
)
