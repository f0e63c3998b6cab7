"""A Lightning batch as a pipeline run: the user's step runs for every micro-batch on every stage.

The action table defines the order of work. :class:`UserProgram` defines a forward. A run fills and
drains the pipeline once, as in PipeDream-Flush (https://arxiv.org/abs/2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lightning.assembly.stage_runner import StageCall, StageRunner
from megatron_lightning.lightning_internals.loops import skips_backward
from megatron_lightning.parallel.numbers import number_on
from megatron_lightning.parallel.shards.other_stages import AbsentListing
from megatron_lightning.pipeline.batch.broadcast import StageBroadcast
from megatron_lightning.pipeline.batch.context_mean import mean_over_context
from megatron_lightning.pipeline.batch.microbatches import (
    batch_size_of,
    kinds_of,
    merge_outputs,
    split_batch,
    tensors_of,
)
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.explicit_calls import ExplicitCalls, not_in_a_step
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.pipeline.schedules.advice import advice_on_few_microbatches
from megatron_lightning.pipeline.stages.crossing import StageCrossing
from megatron_lightning.pipeline.stages.dependencies import CallFacts
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.structure import hooks_inside
from megatron_lightning.step.overrides import users_hooks
from megatron_lightning.step.program import UserProgram
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.strategies.step.step_runner import StepRunner
from megatron_lightning.strategies.step.training import Training


class PipelinedStepRunner(StepRunner):
    """Run batches as pipeline runs, also for a single stage with several micro-batches.

    Args:
        scope: The run context.
        training: Reduces gradients. None before the Trainer fits.
        executor: Runs the action tables.
    """

    def __init__(
        self, scope: RunContext, training: Training | None, executor: PipelineExecutor
    ) -> None:
        super().__init__(scope, training)
        self._executor = executor
        self._executor.forget_boundaries()
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._epoch = 0
        self._broadcast = StageBroadcast(scope.context.pp, scope.context.device)
        partition = scope.part.partition
        self._absent = (
            None if partition is None else AbsentListing(scope.module, scope.context.device)
        )
        self._last_stage = 0 if partition is None else len(partition.stages) - 1
        self._explicit: ExplicitCalls | None = None
        self._facts: dict[Hashable, CallFacts] = {}

    def training_step(self, batch: Any, *indices: Any) -> Any:
        """See the base class. Gradients are computed here."""
        if self._scope.options.pipeline.explicit_steps:
            begun = self._begin_training(batch, indices, batch_size_of(batch) or 1)
            output = self._explicitly("training_step", batch, indices)
        else:
            with self._parts("training_step", batch) as microbatches:
                num_samples = sum(batch_size_of(part) or 1 for part in microbatches)
                begun = self._begin_training(batch, indices, num_samples)
                step = self._scope.module.training_step
                output = self._run("training_step", step, microbatches, indices)
        self.participants.end_batch(begun, output)
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Publish the gradients computed by the pipeline run."""
        self.training.accumulation.reducer.publish()

    def evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        """See the base class. Every stage gets the full output of predictions."""
        begun = self._begin_evaluated(hook, batch, indices)
        output = self._call_hook(hook, batch, indices)
        self.participants.end_batch(begun, output)
        return output

    def repeat(self, batch: Any, indices: tuple[Any, ...]) -> None:
        """See the base class."""
        self._call_hook("training_step", batch, indices)
        self.training.accumulation.reducer.publish()

    def _call_hook(self, hook: str, batch: Any, indices: tuple[Any, ...]) -> Any:
        """Run a step on a batch. Return the step's output."""
        if self._scope.options.pipeline.explicit_steps:
            return self._explicitly(hook, batch, indices)
        with self._parts(hook, batch) as microbatches:
            return self._run(hook, getattr(self._scope.module, hook), microbatches, indices)

    def _parts(self, hook: str, batch: Any) -> AbstractContextManager[list[Any]]:
        """Return the context of steps on the micro-batches of a batch. The context yields the
        micro-batches, for ranks sharing sequences this rank's part of each.
        """
        microbatches = self._split(batch)
        if self._sequence is None:
            return nullcontext(microbatches)
        if self._scope.part.partition is not None:
            self._sequence.find_mixers(self._run_on_stages)
        return self._sequence.divided(hook, batch, microbatches)

    def _run_on_stages(self, keywords: dict[str, Any]) -> Any:
        """Call the pipelined module once on all stages, beside the steps. Return its output on the
        last stage, None on others.
        """
        scope, outputs = self._scope, list[Any]()
        # Shapes between stages are learned anew: blocks that begin to share rows return parts.
        runner = StageRunner(scope.module, scope.part, scope.context, self._executor)
        call = StageCall((), keywords, signature=0)
        runner.run(1, lambda _: call, lambda _, output: outputs.append(output))
        return outputs[0] if outputs else None

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """See the base class."""
        if self._explicit is None:
            raise not_in_a_step()
        hook = self._explicit.begin(trains=torch.is_grad_enabled())
        with self._parts(hook, batch) as microbatches:
            return self._run(hook, fn, microbatches, ())

    def _explicitly(self, hook: str, batch: Any, indices: tuple[Any, ...]) -> Any:
        """Call a hook once with its batch. The hook itself runs functions on the micro-batches."""
        self._explicit = ExplicitCalls(hook)
        try:
            return self._explicit.check(getattr(self._scope.module, hook)(batch, *indices))
        finally:
            self._explicit = None

    def _split(self, batch: Any) -> list[Any]:
        """Split a batch, with the ``split_batch`` of the module or data module if available."""
        size = self._scope.options.micro_batch_size
        for owner in (self._scope.module, getattr(self._scope.module.trainer, "datamodule", None)):
            own_split: Callable[[Any, int], Sequence[Any]] | None = getattr(
                owner, "split_batch", None
            )
            if size is not None and own_split is not None:
                return list(own_split(batch, size))
        return split_batch(batch, size)

    def _run(
        self,
        hook: str,
        call: Callable[..., Any],
        microbatches: Sequence[Any],
        indices: tuple[Any, ...],
    ) -> Any:
        """Run ``call`` on every micro-batch and on every stage, forward and, in training, backward.

        Raises:
            PipelineError: If the step breaks the contract of a pipelined step.
        """
        trains = hook == "training_step" and not skips_backward(self._scope.module.trainer)
        # A training step that calls the pipeline itself may ask for values alone.
        trains = trains and torch.is_grad_enabled()
        schedule = self._schedule(len(microbatches), trains)
        self._forget_shapes()
        new_run = partial(
            StepRun,
            self._scope.module,
            hook,
            call,
            indices=indices,
            last_stage=self._last_stage,
        )
        # Rows with images reach more of the model than rows of text.
        fullest = max(microbatches, key=lambda part: sum(1 for _ in tensors_of(part)))
        crossing = self._crossing(hook, fullest, indices[1:], new_run)
        loss_scale = self.training.loss_scale if trains else 1.0
        run = new_run(microbatches, trains=trains, loss_scale=loss_scale)
        program = self._program(run, crossing)
        self.participants.begin(run)
        if trains:
            self.training.begin_run()
        with self._in_step(crossing, trains), self.participants.around(run):
            self._executor.run(schedule, program, backward=trains)
        if trains:
            self.training.end_backwards()  # before anything else is communicated
        self.participants.end(run)
        output, num_items = self._reduce_and_broadcast(run)
        if trains:
            self._end_training(output, num_items)
        return output

    def _program(self, run: StepRun, crossing: StageCrossing | None) -> UserProgram:
        return UserProgram(
            run,
            self.participants,
            crossing=crossing,
            accumulation=self.training.accumulation if run.trains else None,
            variable_shapes=self._scope.options.pipeline.variable_seq_lengths,
        )

    @contextmanager
    def _in_step(self, crossing: StageCrossing | None, trains: bool) -> Iterator[None]:
        """Around a pipeline run: the parallel module's call is this rank's stages, and other calls
        of all ranks are refused.
        """
        with ExitStack() as during:
            if crossing is not None:
                during.enter_context(crossing.installed())
            if self._absent is not None:
                during.enter_context(self._absent.shown())
            if self._call is not None:
                during.enter_context(self._call.in_step())
            for observer in self.participants.observers if trains else ():
                during.enter_context(self._executor.observed(observer))
            self._metrics.in_step = True
            try:
                yield
            finally:
                self._metrics.in_step = False

    def _end_training(self, output: Any, num_items: Tensor | None) -> None:
        """Hide the gradients until ``backward``: Lightning calls ``zero_grad`` in between."""
        accumulation = self.training.accumulation
        accumulation.add_items(num_items)
        accumulation.reducer.hide()
        if output is None:  # Lightning skips the batch
            accumulation.drop_run()

    def _crossing(
        self,
        hook: str,
        fullest: Any,
        loader: tuple[Any, ...],
        new_run: Callable[..., StepRun],
    ) -> StageCrossing | None:
        """Return the runner of this rank's stages for the step's call of the pipelined module. None
        with a single stage.
        """
        partition, units = self._scope.part.partition, self._scope.part.units
        if partition is None:
            return None

        def run_stage(stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if units is None:
                return forward(*args, **kwargs)
            with units.in_order(hook, stage):
                return units.call(stage, forward, *args, **kwargs)

        checks = self._scope.module.trainer.sanity_checking
        kind = (hook, checks, torch.is_grad_enabled(), loader, kinds_of(fullest))
        is_new = kind not in self._facts
        facts = self._facts.setdefault(kind, CallFacts())
        crossing = StageCrossing(
            hook,
            partition,
            self._scope.context,
            facts,
            run_stage=run_stage,
            reached=self.participants.at_call,
            repeated=self.participants.repeated,
            kept=self.participants.tensors,
        )
        if is_new:
            # Steps may write into their batch.
            copied = tree_map_only(Tensor, Tensor.clone, fullest)
            self._analyze(crossing, new_run([copied], trains=False))
            _warn_of_hooks(partition)
        return crossing

    def _analyze(self, crossing: StageCrossing, run: StepRun) -> None:
        """Run a micro-batch of a kind of step once without values, to find the tensors to
        send between stages. The run has no other effect.
        """
        schedule, program = self._schedule(1, backward=False), self._program(run, crossing)
        with self.participants.rehearsed():
            self._executor.forget_boundaries()  # the analysis sends no tensors
            analyzing = crossing.analyzing(self._scope.module)
            with self._in_step(crossing, trains=False), analyzing:
                self._executor.run(schedule, program, backward=False)
            self._executor.forget_boundaries()

    def _forget_shapes(self) -> None:
        """Exchange shapes between stages again after possible changes, since callbacks freeze
        layers between epochs.
        """
        epoch = self._scope.module.trainer.current_epoch
        if self._scope.options.pipeline.variable_seq_lengths or epoch != self._epoch:
            self._epoch = epoch
            self._executor.forget_boundaries()
            for facts in self._facts.values():
                facts.notes.clear()

    def _schedule(self, num_microbatches: int, backward: bool) -> Schedule:
        """Return the action table, proven once for each number of micro-batches.

        The first training step decides whether the schedule can run. A smaller batch at the end of
        the data must not end the run, nor must the first batch of a resumed run.
        """
        key, choice = (num_microbatches, backward), self._scope.options.schedule
        if key not in self._schedules:
            trainer = self._scope.module.trainer
            resumed = trainer.ckpt_path is not None and trainer.global_step > 0
            first = backward and not resumed and not any(trained for _, trained in self._schedules)
            if first and (advice := advice_on_few_microbatches(choice, num_microbatches)):
                rank_zero_warn(advice)
            make = choice.table if first else choice.table_or_sweep
            self._schedules[key] = schedule = (
                make(num_microbatches) if backward else choice.forward_table(num_microbatches)
            )
            if backward and schedule.name == "sweep":
                rank_zero_warn(
                    f"pipeline_schedule {choice.name} has no order for the {num_microbatches} "
                    "micro-batches of this batch: all forwards run, then all backwards, which "
                    "holds more activations. Set drop_last on the DataLoader to avoid it."
                )
        return self._schedules[key]

    def _reduce_and_broadcast(self, run: StepRun) -> tuple[Any, Tensor | None]:
        """Reduce the outputs over the micro-batches. Give the outputs and the participants' data to
        all stages. Return output and items.
        """
        predicting, device = run.hook == "predict_step", self._scope.context.device
        message: Any = None
        # The last stage lies on pp rank 0, and alone has outputs, logs and metrics. One message
        # gives them to all stages.
        if self._scope.context.pp.rank == 0:
            weights, sharing = run.item_weights, self._scope.context.cp
            output = merge_outputs(
                [run.outputs[i] for i in range(len(run.sizes))], weights, run.sizes
            )
            weight = torch.stack([number_on(device, w) for w in weights]).sum()
            self.participants.before_reduction(run)
            output = mean_over_context(output, weight, sharing)
            if self._sequence is not None and (predicting or _asks_values(run)):
                output = self._sequence.joined(run, output)
            message = (output, run.num_items, self.participants.share(run))
        if self._scope.part.partition is not None:
            message = (
                self._broadcast_objects(message)
                if predicting
                else self._broadcast(message, without=None if self._are_read(run) else 0)
            )
        output, num_items, shared_values = message
        self.participants.apply(run, shared_values)
        return output, num_items

    def _are_read(self, run: StepRun) -> bool:
        """Whether a training step asked for values alone, or the module or a callback, other than
        Lightning's callbacks and ours, has the hook for the outputs.
        """
        if _asks_values(run):
            return True
        name = f"on_{run.hook.removesuffix('_step').replace('training', 'train')}_batch_end"
        return bool(users_hooks(self._scope.module, name))

    def _broadcast_objects(self, value: Any) -> Any:
        """Send all tensors: predictions, on the CPU."""
        return self._scope.context.pp.broadcast_object(tree_map_only(Tensor, Tensor.cpu, value))


def _asks_values(run: StepRun) -> bool:
    """Whether a training step runs the pipeline for values alone."""
    return run.hook == "training_step" and not torch.is_grad_enabled()


def _warn_of_hooks(partition: StagePartition) -> None:
    """Warn of hooks with records on a single stage only."""
    hooked = hooks_inside(partition.module, partition.units, partition.preludes)
    if hooked:
        rank_zero_warn(
            f"forward hooks of {', '.join(hooked[:3])} run on the pipeline stage of these modules "
            "only: a loss or a log that uses what they record misses it. Let the forward return "
            "it."
        )
