"""``Trainer(strategy=MegatronStrategy(...))``: tensor, sequence, pipeline and data parallel training of ordinary modules.

The strategy joins the parts: it checks the layout before anything starts, creates the groups, cuts and shards the module
right after ``configure_model``, runs each step as a pipeline flush, and hands gradients over in Lightning's own hook order.
The work is done by ``assembly`` (model), ``steps`` (pipeline flush), ``gradients`` (reduction, clipping), ``sampling`` (data
order) and ``checkpointing``. No loop, connector, fetcher or callback of Lightning is patched.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.assembly import Assembly, assemble, can_be_cut, check_replicas, check_same_batch
from megatron_lightning.strategies.batches import batch_size_of
from megatron_lightning.strategies.checkpoint_io import ShardedCheckpointIO
from megatron_lightning.strategies.checkpointing import CheckpointGlue
from megatron_lightning.strategies.environment import MegatronEnvironment
from megatron_lightning.strategies.gradients import GradientFlow
from megatron_lightning.strategies.launchers import StartMethod
from megatron_lightning.strategies.sampling import ResumableSampler, resumable, sharded_for_evaluation
from megatron_lightning.strategies.steps import Step, StepRunner

DataParallel = Literal["ddp", "zero1", "fsdp"]
ScheduleName = Literal["auto", "gpipe", "1f1b"]

_STEP_CONTEXTS: Mapping[str, str] = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class MegatronStrategy(MegatronEnvironment):
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
        pipeline_schedule: Order of work in the pipeline; "auto" picks by layout.
        data_parallel: "ddp": all-reduce gradients; "zero1": shard the optimizer over the data-parallel ranks.
        start_method: How local ranks are started when no torchrun or Slurm did: "popen", "spawn" or "fork".
        sharding_plan: Tensor-parallel table by module path of the LightningModule, for a model that has no
            ``sharding_plan()`` of its own.
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
        pipeline_schedule: ScheduleName = "auto",
        data_parallel: DataParallel = "zero1",
        start_method: StartMethod = "popen",
        sharding_plan: ShardingPlan | None = None,
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
        preflight.check_options(layout, micro_batch_size, data_parallel, start_method)
        super().__init__(layout, start_method=start_method, process_group_backend=process_group_backend, timeout_s=timeout_s)
        self.pipeline_schedule = schedules.resolve(pipeline_schedule, self.layout.vpp)
        self.micro_batch_size, self.data_parallel, self.sharding_plan = micro_batch_size, data_parallel, sharding_plan
        self.consumed_samples = 0
        """Samples that all data-parallel ranks together have trained on."""
        self._assembly: Assembly | None = None
        self._executor: PipelineExecutor | None = None
        self._runner: StepRunner | None = None
        self._gradients: GradientFlow | None = None
        self._checkpoints = CheckpointGlue(self)
        self._batch_checked = False
        self._configure_model: Callable[[], None] | None = None
        self._injects_samplers: bool | None = None  # the Trainer's own setting, taken over at the first setup

    # ------------------------------------------------------------------------------------------------- environment

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning asks for the optimizer state after the module's."""
        return True

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last step that clipped by norm."""
        return self._gradients.last_norm if self._gradients else None

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients over every axis, as they are now; a collective."""
        return self.gradient_flow.norm()

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients that the optimizer reads, by global name (this rank's parts)."""
        return self._gradients.by_name() if self._gradients else {}

    def setup_environment(self) -> None:
        """Create the process groups, then make sharding part of ``configure_model``.

        Callbacks copy the module in their ``setup`` hook, and some call ``configure_model`` there; so the module must be cut
        when that call returns, or here if it exists already.
        """
        super().setup_environment()
        module, self._assembly = self.module, None
        if not is_overridden("configure_model", module):
            if can_be_cut(module):  # else it is built in a setup hook, and cut after it
                self._assemble()
            return
        original, self._configure_model = module.configure_model, module.__dict__.get("configure_model")

        @functools.wraps(original)
        def configure_model() -> None:
            original()
            self._assemble()

        module.__dict__["configure_model"] = configure_model

    def _restore_configure_model(self) -> None:
        attributes = self.module.__dict__
        if hasattr(attributes.get("configure_model"), "__wrapped__"):
            del attributes["configure_model"]
            if self._configure_model is not None:
                attributes["configure_model"] = self._configure_model

    def _assemble(self) -> None:
        self._assembly = assemble(self.module, self.context, self.sharding_plan)

    # ------------------------------------------------------------------------------------------------------- setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Finish the module, create optimizers and the engines that run steps and reduce gradients."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        module = self.module
        self._restore_configure_model()
        self._assemble()
        fitting = trainer.state.fn == TrainerFn.FITTING
        preflight.check_module(module, self.layout, self.micro_batch_size, self.context.world_size, fitting=fitting)
        preflight.check_callbacks(trainer, sharded=self.data_parallel == "zero1" and self.context.dp.size > 1)
        length = getattr(getattr(trainer, "datamodule", None), "sequence_length", None)
        preflight.check_config(module, self.layout, self.context.world_size, length if isinstance(length, int) else None)
        connector = trainer._accelerator_connector
        if self._injects_samplers is None:
            self._injects_samplers = connector.use_distributed_sampler
        connector.use_distributed_sampler = False  # process_dataloader does it, and keeps the user's order
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_replicas(dict(module.named_parameters()), self.assembly.specs, self.context)
        self._describe_share()
        if self._executor is None:
            self._executor = PipelineExecutor(self.context, Placement.loop(self.layout.pp, self.layout.vpp))
            self._executor.warm_up()
        self._runner = StepRunner(module, self.context, self.assembly, executor=self._executor, schedule=self.pipeline_schedule)
        self.barrier()
        if fitting:
            self._setup_training(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _describe_share(self) -> None:
        """Say on rank 0 what Lightning's model summary, which sees one rank's part, cannot."""
        if self.context.world_size > 1:
            layout, share = self.layout, sum(parameter.numel() for parameter in self.module.parameters())
            rank_zero_info(
                f"MegatronStrategy: tensor {layout.tp} x pipeline {layout.pp} x data {self.context.dp.size}, sequence parallel "
                f"{'on' if layout.sp else 'off'}, {self.data_parallel}, schedule {self.pipeline_schedule}. The model has "
                f"{self.assembly.num_parameters:,} parameters; this rank holds {share:,} of them, which is what summaries show."
            )

    def _setup_training(self, trainer: pl.Trainer) -> None:
        self._batch_checked = False
        if self._gradients is None:
            self.runner.rng.separate_replicas(self.context.dp.rank)
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        preflight.check_optimizers(self.optimizers, self.layout, self.micro_batch_size, self.context.world_size)
        self._gradients = GradientFlow(
            self.module, self.assembly.specs, self.context, self.optimizers, sharded=self.data_parallel == "zero1"
        )
        if self.context.world_size > 1:
            self._gradients.take_over_clipping(self.precision_plugin)

    @property
    def assembly(self) -> Assembly:
        """How this rank's part of the module was made.

        Raises:
            ConfigError: Before the module is set up.
        """
        if self._assembly is None:
            raise ConfigError("the module has not been sharded yet; it is in or after configure_model.")
        return self._assembly

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
                dataloader = resumable(dataloader, self.context.dp)
            elif trainer.state.stage is not None:
                dataloader = sharded_for_evaluation(dataloader, self.context.dp, trainer.state.stage)
        if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed workers by global rank; ranks of one replica must see the same random transforms.
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.context.dp.rank)
        return dataloader

    # ------------------------------------------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        """Continue an interrupted epoch: with the data order and the random numbers it would have had."""
        self._checkpoints.restore_position(self.train_samplers())

    def train_samplers(self) -> list[ResumableSampler]:
        """Return the samplers of the training data that this strategy made."""
        combined = self.module.trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        return [loader.sampler for loader in loaders if isinstance(getattr(loader, "sampler", None), ResumableSampler)]

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one flush; gradients are computed here (pipelined) or in :meth:`backward` (one stage, one micro-batch)."""
        runner, gradients = self.runner, self.gradient_flow
        microbatches = runner.split(batch, self.micro_batch_size)
        trainer = self.module.trainer
        if not self._batch_checked:
            check_same_batch(batch, self.context)
            self._batch_checked = True
        self.consumed_samples += sum(batch_size_of(part) or 1 for part in microbatches) * self.context.dp.size
        for sampler in self.train_samplers():
            sampler.advance()
        if self._is_native:
            output = super().training_step(batch, *args, **kwargs)
            gradients.note_native_output(output, trainer.accumulate_grad_batches)
            return output
        skip_backward = trainer.fit_loop._skip_backward
        if not skip_backward:
            gradients.begin_flush()
        step = Step(
            hook="training_step",
            microbatches=microbatches,
            args=(*args, *kwargs.values()),
            context=self.precision_plugin.train_step_context,
            backward_scale=None if skip_backward else 1.0 / trainer.accumulate_grad_batches,
            before_last_backward=gradients.before_last_backward,
            after_backwards=None if skip_backward else gradients.after_backwards,
        )
        result = runner.run(step)
        if skip_backward:
            return result.output
        gradients.end_flush(result.num_items)
        if result.output is None:
            gradients.drop_flush()
        return result.output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients between Lightning's backward hooks; compute them first if no schedule did."""
        gradients, module = self.gradient_flow, self.module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if gradients.computed:
            gradients.expose()
        else:
            with gradients.native_backward():
                weighted = gradients.weighted(closure_loss)
                self.precision_plugin.backward(weighted, module, optimizer, *args, **kwargs)
        gradients.finish_flush()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients inside the block without reducing them."""
        with self.gradient_flow.accumulating():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of validation."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of testing."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of prediction; every stage gets the whole output."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, hook: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        microbatches = self.runner.split(batch, self.micro_batch_size)
        if self._is_native:
            return getattr(super(), hook)(batch, *args, **kwargs)
        context = getattr(self.precision_plugin, _STEP_CONTEXTS[hook])
        step = Step(hook=hook, microbatches=microbatches, args=(*args, *kwargs.values()), context=context)
        return self.runner.run(step).output

    @property
    def _is_native(self) -> bool:
        """Whether Lightning's own steps do the work: one stage, whole batches; the same for every batch and rank."""
        return self.num_stages == 1 and self.micro_batch_size is None

    @property
    def runner(self) -> StepRunner:
        """Runs steps.

        Raises:
            ConfigError: Before setup.
        """
        if self._runner is None:
            raise ConfigError("steps can be run after the Trainer has set the strategy up.")
        return self._runner

    @property
    def gradient_flow(self) -> GradientFlow:
        """Reduces and exposes gradients.

        Raises:
            ConfigError: Outside of fitting.
        """
        if self._gradients is None:
            raise ConfigError("gradients exist while the Trainer fits.")
        return self._gradients

    # ------------------------------------------------------------------------------------------------- checkpoints

    @property
    def _checkpoints_are_whole(self) -> bool:
        """Whether they are Lightning's own: with a plugin of the user's, and in a process that has no ranks yet (or had none:
        the one that spawned them).
        """
        return self.user_checkpoint_io is not None or self._context is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the module's state."""
        return self.module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return a handle of the optimizer's state, which :meth:`save_checkpoint` writes by global name."""
        if self._checkpoints_are_whole:
            return super().optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded checkpoint directory; committed by one rename when every rank has written its part.

        After an exception on some ranks only, nothing is saved: the others are not here to write their parts. A checkpoint
        plugin of the user's own gets Lightning's dict instead, with our progress in it.

        Raises:
            ConfigError: If there are ``storage_options`` and no plugin that understands them.
        """
        if self._context is None:  # asked before the Trainer's setup: the module is whole
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.user_checkpoint_io is not None:
            super().save_checkpoint(self._checkpoints.with_progress(checkpoint), filepath, storage_options)
            return
        preflight.check_storage(str(filepath), storage_options)
        interrupted = self.module.trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and self.context.world_size > 1 and not self.all_ranks_interrupted():
            warnings.warn(
                f"{filepath} is not saved: the exception reached only some of the {self.context.world_size} ranks.",
                stacklevel=2,
            )
            return
        self._checkpoints.save(checkpoint, str(self.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's part of a checkpoint of any layout, or of a plain Lightning checkpoint file."""
        if self._context is None:  # asked before the Trainer's setup: there are no parts yet
            whole: dict[str, Any] = ShardedCheckpointIO().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return whole
        if self.user_checkpoint_io is not None:
            return self._checkpoints.progress_of(super().load_checkpoint(checkpoint_path, weights_only))
        if self._assembly is None:
            self._assemble()
        return self._checkpoints.load(str(self.broadcast(str(checkpoint_path))))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the module."""
        self._checkpoints.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        if self._checkpoints_are_whole:
            super().load_optimizer_state_dict(checkpoint)
            if self._runner is not None:
                self._checkpoints.restore_random_state()
            return
        self._checkpoints.load_optimizers(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint."""
        if self.user_checkpoint_io is not None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._checkpoints.remove(str(filepath))

    # ---------------------------------------------------------------------------------------------------- teardown

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one stops, so that nobody waits for it."""
        super().on_exception(exception)
        if self._failure_watch is not None:
            self._failure_watch.report(exception)

    def teardown(self) -> None:
        """Give back hooks and threads; the module stays where it is."""
        self._restore_configure_model()
        if self._gradients is not None:
            self._gradients.release()  # what checkpoints read stays: a Trainer may save after fit
        if self._runner is not None:
            self._runner.metrics.release()
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
        unpicklable = ("_context", "_assembly", "_executor", "_runner", "_gradients", "_failure_watch", "_launcher")
        return {**super().__getstate__(), **dict.fromkeys(unpicklable)}


StrategyRegistry.register("megatron", MegatronStrategy, description="Megatron-style parallelism", override=True)
