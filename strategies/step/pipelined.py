"""One Lightning batch as one pipeline run: the user's step runs for every micro-batch on every
stage.

The action table says what runs when; :class:`UserProgram` says what a forward *is*. A run fills and
drains the pipeline once, as in PipeDream-Flush (https://arxiv.org/abs/2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only, tree_structure

from megatron_lightning.parallel.absent import AbsentListing
from megatron_lightning.parallel.numbers import number_on
from megatron_lightning.parallel.replica_rng import ReplicaRng
from megatron_lightning.pipeline.batch.broadcast import StageBroadcast
from megatron_lightning.pipeline.batch.microbatches import (
    batch_size_of,
    kinds_of,
    merge_outputs,
    split_batch,
)
from megatron_lightning.pipeline.batch.module_state import Change, ModuleState
from megatron_lightning.pipeline.batch.records import MOST_ENTRIES
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.explicit import ExplicitCalls, not_in_a_step
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.pipeline.schedules.advice import advice_on_few_microbatches
from megatron_lightning.pipeline.stages.crossing import StageCrossing
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.stubs import hooks_inside
from megatron_lightning.pipeline.stages.visit import CallFacts
from megatron_lightning.strategies.lightning_internals import skips_backward
from megatron_lightning.strategies.step.averages import check_averages
from megatron_lightning.strategies.step.context_mean import check_alike, mean_over_context
from megatron_lightning.strategies.step.context_outputs import join_outputs
from megatron_lightning.strategies.step.logs import replay
from megatron_lightning.strategies.step.overrides import users_hooks
from megatron_lightning.strategies.step.program import UserProgram
from megatron_lightning.strategies.step.scope import Scope
from megatron_lightning.strategies.step.steps import Steps
from megatron_lightning.strategies.step.training import Training


class PipelinedSteps(Steps):
    """Run batches as pipeline runs, also with one stage and several micro-batches.

    Args:
        scope: What the run works on.
        training: Reduces gradients; None before the Trainer fits.
        executor: Runs the action tables.
    """

    def __init__(self, scope: Scope, training: Training | None, executor: PipelineExecutor) -> None:
        super().__init__(scope, training)
        self._executor = executor
        self._executor.forget_boundaries()
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._epoch = 0
        self._rng = ReplicaRng(scope.context.device)
        self._broadcast = StageBroadcast(scope.context.pp, scope.context.device)
        self._state = _module_state(scope)
        self._unsent: set[str] = set()  # named once
        self._absent = None if self._state is None else AbsentListing(scope.module)
        self._explicit: ExplicitCalls | None = None
        self._facts: dict[Hashable, CallFacts] = {}

    def training_step(self, batch: Any, *indices: Any) -> Any:
        """See the base class; gradients are computed here."""
        self.buffers.begin_batch(self._batches_of_epoch(), only_new=True)
        if self._agreement.num_batches == 1:  # hooks of the first batch have run
            self.training.accumulation.gather.wait()
            check_averages(self._scope)
        if self._scope.options.pipeline.explicit_steps:
            self._begin_training(batch, batch_size_of(batch) or 1)
            output = self._explicitly("training_step", batch, indices)
        else:
            with self._parts(batch) as part:
                microbatches = self._split(part)
                self._begin_training(batch, sum(batch_size_of(part) or 1 for part in microbatches))
                self._hints.begin(microbatches)
                step = self._scope.module.training_step
                if self._sequence is not None:
                    step = self._sequence.unskipped(step)
                output = self._run("training_step", step, microbatches, indices)
                self._hints.end(output)
            if self._sequence is not None:
                self._sequence.check_items("training_step", batch, output)
        self.buffers.synchronize(compare=self._batches_of_epoch() == 1)
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Publish the gradients that the pipeline run has computed."""
        self.training.accumulation.reducer.publish()

    def evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        """See the base class; every stage gets the full output of predictions."""
        # The loader's index, if there are several.
        self._check_first_batch(batch, hook, *indices[1:])
        self._agreement.begin_evaluation()
        if self._scope.options.pipeline.explicit_steps:
            return self._explicitly(hook, batch, indices)
        with self._parts(batch) as part:
            call = getattr(self._scope.module, hook)
            output = self._run(hook, call, self._split(part), indices)
        if self._sequence is not None and hook != "predict_step":
            self._sequence.check_items(hook, batch, output)
        return output

    def _parts(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context in which steps run on what it yields: this rank's part of the
        sequences of a batch, where ranks share them.
        """
        return nullcontext(batch) if self._sequence is None else self._sequence.divided(batch)

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """See the base class."""
        if self._explicit is None:
            raise not_in_a_step()
        return self._run(self._explicit.begin(), fn, self._split(batch), ())

    def _explicitly(self, hook: str, batch: Any, indices: tuple[Any, ...]) -> Any:
        """Call a hook once with its batch; it says what is run on the micro-batches."""
        self._explicit = ExplicitCalls(hook)
        try:
            return self._explicit.check(getattr(self._scope.module, hook)(batch, *indices))
        finally:
            self._explicit = None

    def _split(self, batch: Any) -> list[Any]:
        """Split a batch, with the ``split_batch`` of the module or data module if there is one."""
        size = self._scope.options.micro_batch_size
        for owner in (self._scope.module, getattr(self._scope.module.trainer, "datamodule", None)):
            own: Callable[[Any, int], Sequence[Any]] | None = getattr(owner, "split_batch", None)
            if size is not None and own is not None:
                return list(own(batch, size))
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
        schedule = self._schedule(len(microbatches), trains)
        self._forget_shapes()
        make_program = partial(
            UserProgram,
            self._scope.module,
            hook,
            call,
            indices=indices,
            around=partial(self._around, hook),
            around_backward=getattr(self._scope.precision, "backward_context", nullcontext),
            begin_forward=self._begin_forward,
            reports=self.reports,
            variable_shapes=self._scope.options.pipeline.variable_seq_lengths,
        )
        crossing = self._crossing(hook, microbatches[0], indices[1:], make_program)
        program = make_program(
            microbatches=microbatches,
            crossing=crossing,
            training=self.training if trains else None,
        )
        self._rng.begin_step()
        self._metrics.begin_step()
        if self._state is not None:
            self._state.begin()
        if trains:
            self.training.begin_run()
        watched = nullcontext() if self._sequence is None else self._sequence.watched(hook)
        with self._in_step(crossing, trains), watched, self.reports.recording(hook):
            self._executor.run(schedule, program, backward=trains)
        if trains:
            self.training.end_backwards()  # before anything else is communicated
        if self._state is not None:
            self._state.end()
            self._rng.end_step()
        parts = 0 if self._sequence is None else self._sequence.split.part_length(microbatches[0])
        output, num_items, weights = self._reduce_and_broadcast(program, hook, parts)
        self.reports.log(hook, weights, num_items, program.num_samples)
        if trains:
            self._end_training(output, num_items)
        return output

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
            if trains and self.training.watch is not None:
                during.enter_context(self._executor.observed(self.training.watch))
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
        first: Any,
        loader: tuple[Any, ...],
        make_program: Callable[..., UserProgram],
    ) -> StageCrossing | None:
        """Return what runs this rank's stages where the step calls the pipelined module; None with
        one stage.
        """
        partition, units = self._scope.part.partition, self._scope.part.units
        if partition is None:
            return None

        def run_stage(stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if units is None:
                return forward(*args, **kwargs)
            with units.in_order(hook, stage):
                return units.call(stage, forward, *args, **kwargs)

        kind = (hook, self._scope.module.trainer.sanity_checking, loader, kinds_of(first))
        is_new = kind not in self._facts
        facts = self._facts.setdefault(kind, CallFacts())
        crossing = StageCrossing(
            hook,
            partition,
            self._scope.context,
            facts,
            run_stage=run_stage,
            reached=self._rng.at_call,
            repeated=self._repeated,
            kept=self._state.tensors if self._state is not None else tuple,
        )
        if is_new:
            copied = tree_map_only(Tensor, Tensor.clone, first)  # steps may write into their batch
            self._analyze(
                crossing, make_program(microbatches=[copied], crossing=crossing, training=None)
            )
            self.buffers.forget_writes()  # it restores what it writes
            _warn_of_hooks(partition)
        return crossing

    def _analyze(self, crossing: StageCrossing, program: UserProgram) -> None:
        """Run the first micro-batch of a kind of step once without values, to learn what stages
        have to send; nothing else comes of it.
        """
        state, streams = self._rng.everything(), self._scope.context.rng.state_dict()
        if self._state is not None:
            self._state.begin(undone=True)
        self._rng.begin_step()
        self._executor.forget_boundaries()  # the analysis sends no tensors
        analyzing = crossing.analyzing(self._scope.module)
        with self._in_step(crossing, trains=False), self._without_notes(), analyzing:
            self._executor.run(self._schedule(1, backward=False), program, backward=False)
        self._executor.forget_boundaries()
        if self._state is not None:
            self._state.undo()
        self._rng.restore(state)
        self._scope.context.rng.load_state_dict(streams)

    @contextmanager
    def _repeated(self) -> Iterator[None]:
        """Around a forward that runs again, as a check."""
        with self.reports.paused(), self._without_notes():
            yield

    @contextmanager
    def _around(self, hook: str) -> Iterator[None]:
        """Around one forward."""
        in_order = (
            self._units_in_order(hook) if self._scope.part.partition is None else nullcontext()
        )
        with self._in_hook(hook), in_order:
            yield

    def _begin_forward(self, stage: int, microbatch: int) -> None:
        """Set the random state so that every stage draws what one device draws, and the values that
        the stage left on the module.
        """
        if self._state is not None:
            self._state.enter(stage)
            self._rng.begin_microbatch(microbatch)

    def _forget_shapes(self) -> None:
        """Exchange shapes between stages again where they may have changed: callbacks freeze layers
        between epochs.
        """
        epoch = self._scope.module.trainer.current_epoch
        if self._scope.options.pipeline.variable_seq_lengths or epoch != self._epoch:
            self._epoch = epoch
            self._executor.forget_boundaries()
            for facts in self._facts.values():
                facts.notes.clear()

    def _schedule(self, num_microbatches: int, backward: bool) -> Schedule:
        """Return the action table, proven once for each number of micro-batches.

        The first training step decides whether the schedule can run; a smaller batch later, at the
        end of the data, may not end the run, nor may one with which a resumed run begins.
        """
        key, choice = (num_microbatches, backward), self._scope.options.schedule
        if key not in self._schedules:
            trainer = self._scope.module.trainer
            resumed = trainer.ckpt_path is not None and trainer.global_step > 0
            first = backward and not resumed and not any(trained for _, trained in self._schedules)
            if first and (advice := advice_on_few_microbatches(choice, num_microbatches)):
                rank_zero_warn(advice)
            make = choice.table if first else choice.table_or_sweep
            self._schedules[key] = made = (
                make(num_microbatches) if backward else choice.forward_table(num_microbatches)
            )
            if backward and made.name == "sweep":
                rank_zero_warn(
                    f"pipeline_schedule {choice.name} has no order for the {num_microbatches} "
                    "micro-batches of this batch: all forwards run, then all backwards, which "
                    "holds more activations. Set drop_last on the DataLoader to avoid it."
                )
        return self._schedules[key]

    def _reduce_and_broadcast(
        self, program: UserProgram, hook: str, part_length: int
    ) -> tuple[Any, Tensor | None, list[float | Tensor]]:
        """Reduce outputs, logs and metric counts over the micro-batches and give them to all
        stages, with the weights of the micro-batches if layers report.
        """
        predicting = hook == "predict_step"
        shared: Any = None
        if self._scope.context.pp.rank == 0:
            weights = program.item_weights
            output = merge_outputs(
                [program.outputs[i] for i in range(len(program.sizes))], weights, program.sizes
            )
            sharing = self._scope.context.cp
            weight = torch.stack([number_on(self._scope.context.device, w) for w in weights]).sum()
            returned = (
                f"returned {tree_structure(output)}" if output is not None else "returned None"
            )
            logged = [f"logged {name!r}" for name in program.recorder.names]
            check_alike([returned, *logged], hook, sharing, self._scope.context.device)
            output = mean_over_context(output, weight, sharing)
            if predicting and self._sequence is not None:
                output = join_outputs(output, self._sequence.split.dims, part_length, sharing)
            shared = (
                output,
                program.num_items,
                program.recorder.entries(weights, sharing),
                self._metrics.counts(),
                weights if self.reports.exist else [],
                self._changes(hook),
                self.buffers.begun(),
                self._agreement.marks(),
            )
        if self._state is not None:
            shared = (
                self._broadcast_objects(shared)
                if predicting
                else self._broadcast(shared, without=None if self._are_read(hook) else 0)
            )
        output, num_items, entries, counts, weights, changes, begun, marks = shared
        self.buffers.follow(begun)
        self._metrics.follow(counts)
        if self._state is not None and self._scope.context.pp.rank > 0:
            self._agreement.follow(marks)
            self._state.apply(changes)
        replay(self._scope.module, entries)
        return output, num_items, weights

    def _changes(self, hook: str) -> list[Change]:
        """Return what the step changed on the module, and name once what stays on this stage."""
        if self._state is None:
            return []
        changes, unsent = self._state.changes()
        new = [place for place in unsent if place not in self._unsent]
        if new:
            self._unsent.update(new)
            rank_zero_warn(
                f"{hook} changes {', '.join(new[:3])}, and only the last pipeline stage has the "
                "new value: tensors, numbers, strings and containers of them are sent to the other "
                f"stages, and of containers of more than {MOST_ENTRIES:,} entries only new ones. "
                "Keep such values there if a hook reads them (many counts in a tensor)."
            )
        return changes

    def _are_read(self, hook: str) -> bool:
        """Whether the module or a callback, other than Lightning's own and ours, has the hook that
        is handed the outputs.
        """
        name = f"on_{hook.removesuffix('_step').replace('training', 'train')}_batch_end"
        return bool(users_hooks(self._scope.module, name))

    def _broadcast_objects(self, value: Any) -> Any:
        """Send all tensors: predictions, on the CPU."""
        return self._scope.context.pp.broadcast_object(tree_map_only(Tensor, Tensor.cpu, value))


def _module_state(scope: Scope) -> ModuleState | None:
    """Return the values that a step may change on the module; None with one stage."""
    partition = scope.part.partition
    if partition is None:
        return None
    units = [partition.module.get_submodule(unit) for unit in partition.units]
    return ModuleState(scope.module, pl.LightningModule, units, partition.own, scope.context.device)


def _warn_of_hooks(partition: StagePartition) -> None:
    """Warn of hooks whose records are on one stage only."""
    hooked = hooks_inside(partition.module, partition.units)
    if hooked:
        rank_zero_warn(
            f"forward hooks of {', '.join(hooked[:3])} run on the pipeline stage of these modules "
            "only: a loss or a log that uses what they record misses it. Let the forward return "
            "it."
        )
