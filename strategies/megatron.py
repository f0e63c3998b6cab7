"""``Trainer(strategy=MegatronStrategy(...))``: tensor, sequence, pipeline and data parallel training of ordinary modules.

The strategy joins the parts: it checks the layout before anything starts, creates the groups, cuts and shards the module
right after ``configure_model``, runs each step as a pipeline flush, and hands gradients over in Lightning's own hook order.
The strategy is a chain of classes, each a subclass of the one before and the owner of some attributes, which it gives back
after a run and leaves out of a pickle (for spawned workers) where they are of one process. Only ``setup``, in this file,
reaches across: it makes the parts in their order.

| file | class | owns |
|---|---|---|
| ``environment`` | ``MegatronEnvironment`` | ranks and groups: ``context``, ``failure_watch`` |
| ``counting`` | ``MegatronCounts`` | ``consumed_samples``, ``skipped_steps`` |
| ``building`` | ``MegatronModules`` | this rank's part of the module: ``assembly``, ``sharded_units``; its options |
| ``stepping`` | ``MegatronSteps`` | what runs a batch: ``runner``, ``gradient_flow``, the watch for what is not finite |
| ``checkpoint_hooks`` | ``MegatronCheckpoints`` | directories of any layout: ``checkpoint_options`` and who writes them |
| this one | ``MegatronStrategy`` | the public options, ``executor``, setup and teardown, which call the others in order |

No loop, connector, fetcher or callback of Lightning is patched.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from megatron_lightning.assembly.checks import check_sharded_units
from megatron_lightning.assembly.fsdp import local_size
from megatron_lightning.config import (
    CheckpointOptions,
    DataParallel,
    DataParallelOptions,
    NonFinite,
    PipelineOptions,
    RecomputeOptions,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.split_backward import split_backwards
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.buffers import BufferSync
from megatron_lightning.strategies.callback_checks import check_callbacks, check_checkpoint_links, warn_of_uploads
from megatron_lightning.strategies.checkpoint_hooks import MegatronCheckpoints
from megatron_lightning.strategies.checks.module import check_module, check_one_backward, is_built_later
from megatron_lightning.strategies.failure import AgreedStop
from megatron_lightning.strategies.gradient_readers import check_gradient_readers
from megatron_lightning.strategies.gradients import GradientFlow
from megatron_lightning.strategies.held_schedulers import HeldSchedulers
from megatron_lightning.strategies.launchers import StartMethod
from megatron_lightning.strategies.lightning_internals import connector_of, optimizers_to_device
from megatron_lightning.strategies.sampling import resumable, sharded_for_evaluation
from megatron_lightning.strategies.steps import StepRunner
from megatron_lightning.strategies.toggling import Toggling


class MegatronStrategy(MegatronCheckpoints):
    """Train an ordinary LightningModule with Megatron-style parallelism.

    World size is ``num_nodes x devices``; what the other axes leave is data parallel.

    Args:
        tensor_model_parallel_size: Ranks that share each layer's matrices.
        pipeline_model_parallel_size: Ranks that share the sequence of layers.
        virtual_pipeline_model_parallel_size: Model chunks on each pipeline rank.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that share the experts of a mixture-of-experts layer.
        expert_tensor_parallel_size: Ranks that share each expert's matrices; None: same as tensor.
        sequence_parallel: Shard activations along the sequence between tensor-parallel regions; "auto": when tensor > 1.
        micro_batch_size: Samples of a micro-batch on one data-parallel rank; None: the whole batch is one micro-batch.
        pipeline_schedule: Order of work in the pipeline: "gpipe", "1f1b", "interleaved", "zb-h1" or "zbv"; "auto" picks by
            layout; or your own table: a CSV file, rows of actions, or the class path of a function that makes one.
        pipeline_options: How the model is cut into stages and how micro-batches visit them; None: layers are spread evenly.
        data_parallel: "ddp": all-reduce gradients; "zero1": shard the optimizer over the data-parallel ranks; "fsdp": shard
            gradients and parameters as well.
        data_parallel_options: Buckets, communication and optimizer state of the data-parallel ranks; None: the defaults.
        recompute: What the forward pass does not keep for the backward pass, but computes again or keeps on the host; None: it
            keeps everything.
        non_finite: What is done about infinite or NaN losses and gradients: "raise" names the rank, the parameter and the
            micro-batch; "skip" leaves the optimizer step out; "ignore" does not look.
        start_method: How local ranks are started when no torchrun or Slurm did: "popen", "spawn" or "fork".
        sharding_plan: Tensor-parallel table by module path of the LightningModule, for a model that has no
            ``sharding_plan()`` of its own.
        checkpoint_options: Whether checkpoints are written in the background, and what happens when one cannot be saved.
        process_group_backend: Backend of torch.distributed; None: gloo on CPU, NCCL (and gloo for CPU tensors) on CUDA.
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
        data_parallel: DataParallel = "zero1",
        data_parallel_options: DataParallelOptions | None = None,
        recompute: RecomputeOptions | None = None,
        non_finite: NonFinite = "ignore",
        start_method: StartMethod = "popen",
        sharding_plan: ShardingPlan | None = None,
        checkpoint_options: CheckpointOptions | None = None,
        process_group_backend: str | None = None,
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
        preflight.check_options(layout, micro_batch_size, data_parallel, start_method, non_finite)
        cut = pipeline_options or PipelineOptions()
        super().__init__(
            layout,
            micro_batch_size=micro_batch_size,
            schedule=schedules.resolve(
                pipeline_schedule,
                num_coordinates=layout.pp,
                num_chunks=layout.vpp,
                microbatch_group_size=cut.microbatch_group_size_per_vp_stage,
            ),
            pipeline_options=cut,
            data_parallel=data_parallel,
            data_parallel_options=data_parallel_options,
            recompute=recompute,
            sharding_plan=sharding_plan,
            non_finite=non_finite,
            checkpoint_options=checkpoint_options,
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
        )
        self._executor: PipelineExecutor | None = None
        self._injects_samplers: bool | None = None  # the Trainer's own setting, taken over at the first setup

    # ------------------------------------------------------------------------------------------------- environment

    def check_before_launch(self, trainer: pl.Trainer | None, data: pl.LightningDataModule | None = None) -> None:
        """Check what is known of the module, the Trainer and the data before any process is started or group created.

        Raises:
            ConfigError: If they cannot run under the layout.
        """
        super().check_before_launch(trainer, data)
        if self.lightning_module is not None and trainer is not None:
            self._check_module(trainer)

    def _check_module(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_module(self.module, self.layout, self.micro_batch_size, fitting=fitting)
        replicas = self.layout.data_parallel_size(self._planned_world_size)
        check_callbacks(
            trainer, self.layout, self.data_parallel, replicas, overlapped=self.data_parallel_options.overlap_param_gather
        )
        if self.data_parallel == "fsdp" and replicas > 1:
            if not is_built_later(self.module):
                check_sharded_units(self.module)
            if fitting:
                check_one_backward(self.module, replicas)
        check_checkpoint_links(trainer)
        if fitting:
            preflight.check_accumulation(trainer.accumulate_grad_batches)
            check_gradient_readers(trainer, self.layout, self.data_parallel, replicas)

    def forget_connections(self) -> None:
        """See the base class."""
        super().forget_connections()
        self._executor = None

    # ------------------------------------------------------------------------------------------------------- setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Finish the module, create optimizers and the engines that run steps and reduce gradients."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        module = self.module
        self._restore_configure_model()
        self._assemble()
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._check_module(trainer)  # once more: hooks may have changed it
        preflight.warn_of_idle_pipeline(self.layout, self.micro_batch_size)
        preflight.check_config(module, self.layout, self.context.world_size, getattr(trainer, "datamodule", None))
        connector = connector_of(trainer)
        if self._injects_samplers is None:
            self._injects_samplers = connector.use_distributed_sampler
        connector.use_distributed_sampler = False  # process_dataloader does it, and keeps the user's order
        self._loaders_checked.clear()
        self._place()
        self._describe_share()
        if self.layout.tp * self.num_stages > 1 or self._units is not None:
            self._set_example_aside()
        if self._executor is None:
            self._executor = PipelineExecutor(self.context, self.pipeline_schedule.placement)
            self._executor.warm_up()
        if fitting and self.pipeline_schedule.splits_backward:
            self._split_backwards()
        self._runner = StepRunner(
            module,
            self.context,
            self.assembly,
            executor=self._executor,
            schedule=self.pipeline_schedule,
            variable_shapes=self.pipeline_options.variable_seq_lengths,
            units=self._units,
        )
        self._buffers = BufferSync(module, self.assembly, self.context)
        self.barrier()
        self._learn_log_dir(trainer)
        if fitting:
            self._setup_training(trainer)
            if self.user_checkpoint_io is None and trainer.checkpoint_callbacks:
                warn_of_uploads(trainer)
        self.setup_precision_plugin()
        if fitting and not self.data_parallel_options.optimizer_cpu_offload:
            optimizers_to_device(self.optimizers, self.root_device)

    def _describe_share(self) -> None:
        """Say on rank 0 what Lightning's model summary, which sees one rank's part, cannot."""
        if self.context.world_size > 1:
            layout, share = self.layout, local_size(self.module)
            shards = "" if self._units is None else f" {self._units.describe()}"
            rank_zero_info(
                f"MegatronStrategy: tensor {layout.tp} x pipeline {layout.pp} x data {self.context.dp.size}, sequence parallel "
                f"{'on' if layout.sp else 'off'}, {self.data_parallel}, schedule {self.pipeline_schedule}. The model has "
                f"{self.assembly.num_parameters:,} parameters; this rank holds {share:,} of them, which is what summaries show."
                f"{shards}"
            )

    @property
    def executor(self) -> PipelineExecutor:
        """Runs the action tables of the pipeline.

        Raises:
            ConfigError: Before the Trainer has set the strategy up.
        """
        if self._executor is None:
            raise ConfigError("the pipeline exists after the Trainer has set the strategy up.")
        return self._executor

    def _split_backwards(self) -> None:
        """Let linear layers put off their weight gradients, and say on rank 0 which layers cannot."""
        split, whole = split_backwards(self.module, self.executor.weight_gradients)
        rank_zero_info(
            f"MegatronStrategy: schedule {self.pipeline_schedule.name} puts off the weight gradients of {len(split)} layers on "
            f"this rank. {len(whole)} others with matrices compute theirs with the input gradients"
            f"{': ' if whole else ''}{', '.join(whole[:5])}{', …' if len(whole) > 5 else ''}."
        )

    def _setup_training(self, trainer: pl.Trainer) -> None:
        self._begin_counting()
        if self._gradients is None:
            self.runner.rng.separate_replicas(self.context.dp.rank)
        self._reset_optimizers_and_schedulers()
        with preflight.explained_empty_optimizers(self.layout, self.context.pp.rank):
            self.setup_optimizers(trainer)
        options, world_size = self.data_parallel_options, self.context.world_size
        sharded = self.data_parallel != "ddp" and self.context.dp_cp.size > 1
        preflight.check_optimizers(self.optimizers, self.layout, self.micro_batch_size, world_size, options, sharded=sharded)
        self._gradients = GradientFlow(
            self.module,
            self.assembly.specs,
            self.context,
            self.optimizers,
            sharded=self.data_parallel == "zero1",
            options=options,
            stage_of=self.assembly.stage_of,
            units=self._units,
        )
        if self.context.world_size > 1 or self._gradients.managed:
            self._gradients.take_over_clipping(self.precision_plugin)
        if self._loss_scaling is not None:
            self._loss_scaling.ranks, self._loss_scaling.read_by = self.context.axis("world"), self._gradients.read_by
        self._release_methods()
        if self._gradients.managed and not self.module.automatic_optimization:
            self._toggling = Toggling(self.module, self._gradients)
        if self.may_skip_steps:
            self._held = HeldSchedulers(self.module, self.lr_scheduler_configs, lambda: self._step_skipped)
        self._watch_for_non_finite()
        self._watch_for_forgotten_parameters()

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Give each data-parallel rank its share of the data; training continues where ``consumed_samples`` says."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        trainer = self.module.trainer
        if self._injects_samplers:
            if trainer.training:
                dataloader = resumable(
                    dataloader, self.context.dp, consumed=self.consumed_samples, micro_batch_size=self.micro_batch_size
                )
            elif trainer.state.stage is not None:
                dataloader = sharded_for_evaluation(dataloader, self.context.dp, trainer.state.stage)
        if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed workers by global rank; ranks of one replica must see the same random transforms.
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.context.dp.rank)
        return dataloader

    # ---------------------------------------------------------------------------------------------------- teardown

    def on_exception(self, exception: BaseException) -> None:
        """Break this rank's connections, so that nobody waits for it; the launcher has told the others why."""
        super().on_exception(exception)
        if self._failure_watch is not None and not isinstance(exception, AgreedStop):
            self._failure_watch.abort()

    def teardown(self) -> None:
        """Give back hooks and threads, after the last save is committed; the module stays where it is."""
        try:
            self.finish_saving()
        finally:
            self._release()

    def _release(self) -> None:
        self._restore_configure_model()
        self._release_steps()
        self._give_module_back()
        if self._failure_watch is not None:
            self._failure_watch.stop()
            self._failure_watch = None
        self.precision_plugin.teardown()
        if self.user_checkpoint_io is not None:
            self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_executor": None}


StrategyRegistry.register("megatron", MegatronStrategy, description="Megatron-style parallelism", override=True)
