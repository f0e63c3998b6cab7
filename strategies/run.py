"""One run of the Trainer: a fit, validate, test or predict, and all objects of equal lifetime.

A run begins when the ranks are connected, is complete after the strategy's ``setup``, and stays
readable after its teardown, because users save after ``fit``. Every replacement on a foreign object
registers an undo on :attr:`Run.undo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from megatron_lightning.assembly.checks.replicas import check_trained_replicas
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.full_state import FullState, path_of
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.assembly.state.saving_guard import SavingGuard
from megatron_lightning.checkpoint.writing.saver import Saver
from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.part_saving import PartSaving, PartWarning
from megatron_lightning.launch.ranks import ProcessGroups
from megatron_lightning.lightning_internals.checkpoints import saves_or_loads
from megatron_lightning.lightning_internals.logs import hide_sync_advice
from megatron_lightning.lightning_internals.trainer import attached_trainer, connector_of
from megatron_lightning.optim.gradients.parameter_shard import MainShard
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.step.loaders.transfer import BatchCopies
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.progress import Progress
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.strategies.checkpoint.checkpoints import Checkpoints
from megatron_lightning.strategies.checkpoint.resume_point import EpochStartRecorder, ResumePoint
from megatron_lightning.strategies.module import (
    defer_weight_gradients,
    fuse_model_losses,
    print_layout,
    wrap_configure_model,
)
from megatron_lightning.strategies.partitioned_module import PartitionedModule
from megatron_lightning.strategies.step.loaders.dataloaders import (
    announce_skipped,
    skipped_samples,
)
from megatron_lightning.strategies.step.loaders.shared_loader import shared_loader
from megatron_lightning.strategies.step.native import NativeStepRunner
from megatron_lightning.strategies.step.pipelined import PipelinedStepRunner
from megatron_lightning.strategies.step.step_runner import StepRunner
from megatron_lightning.strategies.step.training import Training
from megatron_lightning.strategies.step.validation_clock import ValidationClock
from megatron_lightning.strategies.summary import hidden_example


class Run:
    """One run of a strategy.

    Args:
        module: The LightningModule.
        ranks: Connected groups.
        options: The strategy's.
        progress: The strategy's counts.
        ranks_per_node: Ranks of each node.
        layer_sync: Lightning's plugin for BatchNorm over the replicas.
        previous: The run before. The part of the module and the optimizers of ``previous`` are
            reused.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        ranks: ProcessGroups,
        options: StrategyOptions,
        progress: Progress,
        *,
        ranks_per_node: int,
        layer_sync: LayerSync | None,
        previous: Run | None,
    ) -> None:
        self.module = module
        self._ranks = ranks
        self._options = options
        self._progress = progress
        self._layer_sync = layer_sync
        self.undo = ExitStack()
        """Restores replaced attributes of foreign objects (module, Trainer, plugins, metrics) after
        this run.
        """
        self._until_setup = self.undo.enter_context(ExitStack())
        self._injects_samplers = True
        self._notes: dict[str, object] = {}  # of guards
        # A second run of the same module (fit, then test) takes over its part, its optimizers and
        # its communicators.
        earlier_module: PartitionedModule | None = None
        if previous is not None and previous.module is module:
            earlier_module = previous.partitioned
            self._notes = previous._notes
        self.partitioned: PartitionedModule = PartitionedModule(
            module, ranks.context, options, self.undo, layer_sync=layer_sync, earlier=earlier_module
        )
        """The module: reduced to this rank's part, described and placed."""
        self._training: Training | None = None if previous is None else previous._training
        self._fits = False
        self._steps: StepRunner | None = None
        self._pipeline_executor: PipelineExecutor | None = (
            None if previous is None else previous._pipeline_executor
        )
        saver: Saver = (
            Saver(options.checkpoint, options.timeout)
            if previous is None
            else previous.checkpoints.saver
        )
        self.checkpoints: Checkpoints = Checkpoints(
            module,
            ranks,
            options,
            progress,
            saver=saver,
            ranks_per_node=ranks_per_node,
            share_buffers=self.share_buffers,
            check_replicas=self.check_replicas,
            main_shards=self._main_shards,
        )
        """Saves and loads."""
        if earlier_module is not None and previous is not None:  # users save after later runs, too
            self.checkpoints.state.points.last = previous.checkpoints.state.points.last
            self.checkpoints.left_out = previous.checkpoints.left_out
        self.copies = BatchCopies(ranks.context.device)
        """Copies batches to the device."""
        self.clock = ValidationClock(ranks.broadcast)
        """Decides for all ranks when a validation by time is due."""
        wrap_configure_model(module, self.partitioned.assemble_built, self._until_setup)

    # --------------------------------------------------------------------------------------- module

    @property
    def part(self) -> Part:
        """Part of the module on this rank.

        Raises:
            ConfigError: Before the module is assembled.
        """
        return self.partitioned.part

    # ---------------------------------------------------------------------------------------- setup

    def begin_setup(self, trainer: pl.Trainer) -> None:
        """Complete the module. Take over Lightning's work on the module and on its DataLoaders."""
        connector = connector_of(trainer)
        self._until_setup.close()
        self.partitioned.assemble()
        # ``process_dataloader`` shares the data, in the user's order.
        self._injects_samplers = connector.use_distributed_sampler
        self.undo.callback(
            setattr, connector, "use_distributed_sampler", connector.use_distributed_sampler
        )
        connector.use_distributed_sampler = False
        if self._ranks.context.dp.size == 1:
            self.undo.callback(hide_sync_advice())
        if self._layer_sync is not None:
            self.undo.callback(self._layer_sync.revert, self.module)

    def connect_pipeline(self, *, fitting: bool) -> None:
        """Create the executor, and let linear layers defer their weight gradients if the schedule
        splits backward.
        """
        schedule = self._options.schedule
        if (
            self._pipeline_executor is None
            or self._pipeline_executor.context is not self._ranks.context
        ):
            self._pipeline_executor = PipelineExecutor(self._ranks.context, schedule.placement)
            self._pipeline_executor.transport.warm_up()
        print_layout(self.module, self.part, self._ranks.context, self._options)
        if (
            self._options.layout.model_parallel_size * self._options.layout.num_stages > 1
            or self.part.units is not None
        ):
            self.undo.enter_context(hidden_example(self.module))
        fuse_model_losses(self.module, self._options, self.undo)
        if fitting and schedule.splits_backward:
            defer_weight_gradients(self.module, schedule, self.executor, self.undo)

    def begin_training(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRSchedulerConfig],
        precision: Precision,
    ) -> None:
        """Reduce gradients for these optimizers from now on."""
        self._training = Training(self._scope(precision), optimizers, schedulers)
        self._fits = True
        self._record_points()

    def _record_points(self) -> None:
        """Record where a checkpoint resumes, in callbacks around the user's."""
        callbacks: list[pl.Callback] = vars(self.module.trainer)["callbacks"]
        points = self.checkpoints.state.points
        starts = EpochStartRecorder(points)
        callbacks[:] = [starts, *callbacks, points]
        for callback in (starts, points):
            self.undo.callback(callbacks.remove, callback)

    def begin_steps(self, precision: Precision) -> None:
        """Run batches from now on: by Lightning's own steps, or as pipeline runs."""
        if self.part.units is not None:
            self.part.units.stored.encode()
        scope, training = self._scope(precision), self._training if self._fits else None
        if self.part.units is not None or self._options.layout.model_parallel_size > 1:
            judge = PartSaving.judge_of(scope)
            refuse = None if judge is None else judge.refuse
            SavingGuard.attach(self.partitioned.state(), PartWarning(judge, saves_or_loads), refuse)
        if self._options.is_native:
            self._steps = NativeStepRunner(scope, training)
        else:
            self._steps = PipelinedStepRunner(scope, training, self.executor)

    def _scope(self, precision: Precision) -> RunContext:
        return RunContext(
            module=self.module,
            part=self.part,
            context=self._ranks.context,
            options=self._options,
            progress=self._progress,
            precision=precision,
            notes=self._notes,
            undo=self.undo,
        )

    def process_dataloader(self, loader: object) -> object:
        """Give each data-parallel rank its share of the data. Training continues after
        ``consumed_samples``. A collective.

        Raises:
            ConfigError: If ranks cannot read their loaders together.
        """
        if self.module.trainer.training:
            self._progress.skipped = skipped_samples(self.module.trainer)
            announce_skipped(self._progress.skipped, self._progress.consumed_samples)
        return shared_loader(
            loader,
            self.module.trainer,
            self._ranks.context,
            self._options,
            injects_samplers=self._injects_samplers,
            consumed=self._progress.consumed_samples,
            skipped=self._progress.skipped,
            reduces=lambda: self.steps.reduces,
        )

    # ---------------------------------------------------------------------------------------- steps

    @property
    def steps(self) -> StepRunner:
        """Runs batches.

        Raises:
            ConfigError: Before setup.
        """
        if self._steps is None:
            raise ConfigError("steps can be run after the Trainer has set the strategy up.")
        return self._steps

    @property
    def executor(self) -> PipelineExecutor:
        """Runs the action tables of the pipeline.

        Raises:
            ConfigError: Before setup.
        """
        if self._pipeline_executor is None:
            raise ConfigError("the pipeline exists after the Trainer has set the strategy up.")
        return self._pipeline_executor

    @property
    def training(self) -> Training:
        """Gradients and optimizer steps, of this run or of an earlier ``fit``.

        Raises:
            ConfigError: Before the Trainer fits.
        """
        if self._training is None:
            raise ConfigError("gradients exist while the Trainer fits.")
        return self._training

    @property
    def has_trained(self) -> bool:
        """Whether there are optimizers and gradients."""
        return self._training is not None

    def share_written(self) -> None:
        """Share weights written by an optimizer outside of a step with all ranks, now and before
        the next batch. A collective.
        """
        if self._training is not None:
            self._training.accumulation.written.share()
            self.expect_writes()

    def expect_writes(self) -> None:
        """Look for written weights before the next batch, since the next hooks may write
        weights.
        """
        if self._training is not None:
            self._training.accumulation.written.expect()

    def follow_load(self) -> None:
        """Notify the participants of weights loaded from a checkpoint. A collective."""
        self._notes.clear()
        if self._steps is not None:
            self._steps.participants.loaded()

    def interrupted_at(self) -> ResumePoint | None:
        """Return the last update before an exception. None: there was no exception behind it."""
        trainer = attached_trainer(self.module)
        return None if trainer is None else self.checkpoints.state.points.interrupted(trainer)

    def at_last_update(self) -> AbstractContextManager[None]:
        """Return the context of a save, with the buffers from before a step that is under way."""
        if self._steps is None or not self.checkpoints.state.points.is_behind(self.module.trainer):
            return nullcontext()
        return self._steps.inputs.before_step()

    def share_buffers(self) -> None:
        """Make diverged buffers equal again among ranks with the same buffer. A collective."""
        if self._steps is not None:
            self._steps.buffers.synchronize(compare=True)

    def check_replicas(self) -> None:
        """Check that ranks hold equal values of replicated tensors, after :meth:`share_buffers`. A
        collective.

        Raises:
            ShardingError: Names the tensors with different values.
        """
        if self._training is not None:
            self._training.accumulation.gather.wait()
        check_trained_replicas(self.module, self.part, self._ranks.context)

    def refuse_in_step(self, what: str, advice: str | None = None) -> None:
        """Refuse a call of all ranks in the middle of a pipelined step.

        Raises:
            PipelineError: In a step, over several pipeline ranks.
        """
        if self._steps is not None:
            self._steps.refuse_in_step(what, advice)

    # ---------------------------------------------------------------------------------- checkpoints

    def refuse_uneven(self, what: str) -> None:
        """Refuse a collective of the data-parallel ranks in an evaluation step, if the ranks run
        different numbers of steps.

        Raises:
            ConfigError: If the numbers differ.
        """
        if self._steps is not None:
            self._steps.refuse_uneven(what)

    def _main_shards(self) -> dict[str, MainShard]:
        training = self._training
        return {} if training is None else training.accumulation.reducer.main_shards()

    def module_state(self) -> dict[str, Any]:
        """Return the state dict of this rank's part, with the weights of the last step."""
        if self._training is not None:
            self._training.accumulation.gather.wait()
        state = self.module.state_dict()
        return state if self.part.units is None else self.part.units.as_used(state)

    def full_state(self, module: nn.Module | None = None) -> FullState:
        """Collect the state of the module, or of a sub-module, as on one device. A collective."""
        self.refuse_in_step("the state of the full model")
        self.share_written()
        self.share_buffers()
        state = ModuleState(self.module, self.part, self._ranks.context, self._main_shards())
        return FullState(state, self.module_state(), path_of(self.module, module))
