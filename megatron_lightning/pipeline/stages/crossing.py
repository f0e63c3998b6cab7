"""Run the user's step on a pipeline stage, without a change to any forward.

Every stage runs the user's own step and the pipelined module's own forward on the real batch. The
stage intercepts the calls of the module's units:

    unit before the stage    returns the received tensors, in the structure of the real output, or a
                             placeholder, if nothing depends on the output: NaN of the real shape
    unit of the stage        runs, and keeps outputs used by later stages to be sent
    first unit behind it     is not entered: the step is unwound

Preludes (``preludes``) are intercepted alike: the first stage runs a prelude, and later stages
return what was received or a placeholder, without the prelude's hooks.

Code between two units thus runs on the stages of both units and only counts on the later stage. On
the last stage the rest of the forward and of the step runs. Before the call of the module all
stages compute the same.

``unit_calls`` runs and replaces the calls. The first micro-batch of every kind of call runs twice:
once without values to learn the dependencies (:class:`CallFacts`), and then for real, when the NaN
of the placeholders must reach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.batch.microbatches import tensors_of
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.stages import crossing_errors as errors
from megatron_lightning.pipeline.stages.dependencies import CallFacts, StageCall
from megatron_lightning.pipeline.stages.dependency_run import CallAnalysis, intercepted
from megatron_lightning.pipeline.stages.parallel_call import replaced_attribute
from megatron_lightning.pipeline.stages.preludes import call_index
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.structure import Placeholders, user_hooks
from megatron_lightning.pipeline.stages.unit_calls import UnitCalls


class StageExit(BaseException):
    """Unwinds the user's step on entry to the first unit behind the stage."""

    def __init__(self, outputs: StageTensors) -> None:
        super().__init__("the step left a pipeline stage")
        self.outputs = outputs


class StageCrossing:
    """Interception of the pipelined module and the module's units, for a pipeline run.

    Args:
        hook: Name of the user's step, for messages.
        partition: The pipelined module and the module's stages.
        context: Groups of this rank.
        facts: Facts about this kind of call.
        run_stage: Called with a stage, the stage's forward and the forward's arguments. Runs the
            forward with gathered parameters.
        reached: Called with the micro-batch, right before the stage runs.
        repeated: Returns the context of a forward that runs again, as a check.
        kept: Returns the tensors that the step leaves outside of the output: on attributes of the
            module, and logged.
    """

    def __init__(
        self,
        hook: str,
        partition: StagePartition,
        context: ParallelContext,
        facts: CallFacts,
        *,
        run_stage: Callable[..., Any],
        reached: Callable[[int], None] = lambda _: None,
        repeated: Callable[[], AbstractContextManager[None]] = nullcontext,
        kept: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._hook = hook
        self._partition = partition
        self._context = context
        self._facts = facts
        self._run_stage = run_stage
        self._reached = reached
        self._repeated = repeated
        self._kept = kept
        self._microbatch = 0
        self._calls = UnitCalls(partition, context, facts, kept)
        self._stage_calls: dict[tuple[int, int], StageCall] = {}
        self._tests = False
        self._is_suspended = False
        self._forward = partition.module.forward
        self._num_preludes = len(partition.preludes)

    # ------------------------------------------------------------------------------- of the program

    def is_last(self, stage: int) -> bool:
        """Return whether the step runs to the end on ``stage``."""
        return self._partition.is_last(stage)

    @property
    def crossed(self) -> bool:
        """Whether the step has called the module since :meth:`enter`."""
        return self._calls.current.entered

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Intercept the module and the module's units inside the block."""
        module = self._partition.module
        replica = 1_000_003 * self._context.dp.rank
        stream = "training-seeds" if self._hook == "training_step" else "evaluation-seeds"
        self._calls.seed = self._context.rng.draw_seed(stream) + replica
        with ExitStack() as undo:
            undo.enter_context(replaced_attribute(module, "forward", self.cross))
            for index, name in enumerate(self._partition.units):
                unit = module.get_submodule(name)
                undo.enter_context(intercepted(unit, partial(self._call_unit, index, unit)))
            for position, name in enumerate(self._partition.preludes):
                prelude = module.get_submodule(name)
                call = partial(self._call_prelude, position, prelude)
                undo.enter_context(intercepted(prelude, call))
            undo.callback(self._calls.absent.hide)
            yield

    def enter(
        self, stage: int, microbatch: int, received: StageTensors | None, signature: Hashable
    ) -> None:
        """Set stage, micro-batch and input of the module's next call."""
        self._calls.enter(stage, microbatch, received, signature)
        self._microbatch = microbatch
        self._tests = self._calls.analysis is None and stage not in self._facts.tested

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run units called inside the block, after the module's forward, without interception."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @contextmanager
    def analyzing(self, root: nn.Module) -> Iterator[None]:
        """Run steps without values inside the block, up to the end of the module's forward.
        Afterwards the contents of messages are known. A collective of the pipeline. ``root``: the
        LightningModule.

        Raises:
            ConfigError: If a side channel of units crosses a stage boundary.
        """
        self._calls.analysis = CallAnalysis(self._partition)
        with self._calls.analysis.running(root):
            yield
        self._calls.analysis.conclude(self._facts, self._context)
        self._calls.analysis = self._calls.trace = None

    @contextmanager
    def recomputing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Enclose the backward of a stage: recomputation calls units again, in any order."""
        self._calls.current = self._stage_calls.pop((stage, microbatch), self._calls.current)
        self._calls.is_recomputing = True
        self._tests = False
        try:
            yield
        finally:
            self._calls.is_recomputing = False

    def check_result(self, result: Any) -> None:
        """Check that the step has not used a placeholder recorded by a hook.

        Raises:
            PipelineError: If the step's result is NaN while the module's results are not.
        """
        if not self._tests:
            return
        units = self._partition.units[: self._calls.current.first]
        hooked = [name for name in units if user_hooks(self._partition.module.get_submodule(name))]
        if hooked and _has_nan(result):
            raise errors.recorded_placeholder(self._hook, hooked[0])

    # -------------------------------------------------------------------------------- of the module

    def cross(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward for the stage. Return on the last stage only.

        Raises:
            StageExit: On every other stage, with the outputs.
            PipelineError: If a step calls the module in a way that a pipeline cannot run.
        """
        self._begin()
        output = self._run(args, kwargs)
        if self._tests:
            self._check_placeholders(output, args, kwargs)
        if isinstance(output, StageExit):
            raise output
        return output

    def _begin(self) -> None:
        call = self._calls.current
        if call.entered:
            raise errors.second_call(self._hook, call.stage, self._microbatch)
        if not call.was_called_before:
            raise errors.unexpected_call(self._hook, call.stage)
        call.entered = True
        call.preludes.enter()
        call.sent_at_entry = dict(call.sent)
        call.records = torch.is_grad_enabled()
        if call.records:
            self._stage_calls[call.stage, self._microbatch] = call
        self._reached(self._microbatch)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the forward's output, or the exit that left the forward."""
        # A stage leaves the user's forward by an exception, since the code between units would need
        # outputs of later stages. The exception ends right around the forward, and not around the
        # stage.
        exits: list[StageExit] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._calls.trace or nullcontext():
                    output = self._forward(*args, **kwargs)
                if self._calls.current.next < len(self._partition.units):
                    raise errors.missing_unit(
                        self._hook, self._partition.units[self._calls.current.next]
                    )
                if self._calls.trace is not None:
                    self._calls.trace.end([output, self._kept()])
                self._calls.learn()
                if self._calls.trace is not None:
                    raise StageExit(StageTensors())
            except StageExit as exit_:  # hooks of FSDP2 have to see the end of the forward
                # The traceback's frames hold the hooks of unfinished checkpoints.
                exit_.__traceback__ = None
                exits.append(exit_)
                return tuple(exit_.outputs)
            return output

        watched = self._calls.analysis.watching_draws() if self._calls.analysis else nullcontext()
        with self._calls.seeded(self._calls.current.seed), watched:
            output = self._run_stage(self._calls.current.stage, forward, *args, **kwargs)
        return exits[0] if exits else output

    def _check_placeholders(self, output: Any, args: Any, kwargs: Any) -> None:
        """Check that NaN in the placeholders has reached nothing.

        Raises:
            PipelineError: If NaN has reached an output.
        """
        calls, call = self._calls, self._calls.current
        results = output.outputs if isinstance(output, StageExit) else output
        self._facts.tested.add(call.stage)
        # NaN received from a stage before is the model's own.
        if not _has_nan(results) or _has_nan(call.received):
            return
        # The forward runs once more with zeros in the placeholders: NaN that disappears came from
        # one of them. The call's state is set aside, so that the repetition sends and records
        # nothing.
        calls.current = replace(
            call,
            next=0,
            preludes=call.preludes.restarted(),
            sent=dict(call.sent_at_entry),
            borrowed=[],
            records=False,
        )
        placeholders, device = calls.placeholders, self._context.device
        calls.placeholders = Placeholders(0.0, device)
        with torch.no_grad(), self._repeated():
            again = self._run(args, kwargs)  # NaN may have other reasons
        calls.current = call
        calls.placeholders = placeholders
        if not _has_nan(again.outputs if isinstance(again, StageExit) else again):
            raise errors.unsent_output(call.stage)

    # --------------------------------------------------------------------------------- of the units

    def _call_unit(
        self, index: int, unit: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace the call of a unit."""
        if self._is_suspended:
            return run(*args, **kwargs)
        calls, call = self._calls, self._calls.current
        # A backward that recomputes runs user code between units again. Only units of the stage
        # count; the order was checked in the first forward.
        if calls.is_recomputing:
            if index >= call.end:
                raise StageExit(StageTensors())
            if index >= call.first:
                return calls.run_seeded(index, run, args, kwargs)
            return calls.stub(index, unit, args, kwargs)
        if not call.entered:
            self._begin()
            # Outputs can only be followed to the end of a forward, and there is none.
            calls.trace = None
        if index != call.next:
            raise errors.wrong_order(self._hook, self._partition.units, index, call.next)
        call.next += 1
        # Behind the stage nothing can be computed: unwind, and send.
        if index >= call.end:
            raise StageExit(calls.outputs())
        # Before the stage: received, or a placeholder.
        if index < call.first:
            return calls.stub(index, unit, args, kwargs)
        if call.records and not torch.is_grad_enabled() and _is_trained(unit):
            raise errors.no_graph(self._partition.units[index])
        output = calls.run(index, unit, run, args, kwargs)
        if calls.analysis and calls.trace is None and call.next == len(self._partition.units):
            calls.learn()
            raise StageExit(StageTensors())
        return output

    def _call_prelude(
        self, position: int, prelude: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace the call of a prelude."""
        if self._is_suspended:
            return run(*args, **kwargs)
        calls, call = self._calls, self._calls.current
        if calls.is_recomputing and call.stage == 0:
            return calls.run_seeded(call_index(position, 0, self._num_preludes), run, args, kwargs)
        if calls.is_recomputing:
            index = call.preludes.only(position)
        else:
            index = call.preludes.next(position)
            if calls.trace is not None and not call.entered:
                # Code before the pipelined forward is not followed.
                calls.trace.use_everywhere(index)
        if call.stage == 0:
            return calls.run(index, prelude, run, args, kwargs)
        if index not in call.structures:
            raise errors.late_prelude(self._hook, self._partition.preludes[position])
        return calls.stub(index, prelude, args, kwargs)


def _is_trained(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())


def _has_nan(tree: Any) -> bool:
    tensors = [*tensors_of(tree), *(x for x in tree_leaves(tree) if isinstance(x, Tensor))]
    # Logits that are not computed unless read stand for other values.
    values = [getattr(tensor, "stands_for", tensor) for tensor in tensors]
    return any(bool(tensor.isnan().any()) for tensor in values if tensor.is_floating_point())
