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

Random numbers between units are equal on all stages, since each forward is seeded at the start. A
unit draws only on the unit's own stage, from a seed of the unit's own. The unit's seed leaves the
generator between units unchanged, and a recomputation uses the seed again.

A boundary carries the output of the unit before the boundary, and every earlier output still used
behind the boundary (``dependencies``). The first micro-batch of every kind of call runs twice: once
without values to learn the dependencies (:class:`CallFacts`), and then for real, when the NaN of
the placeholders must reach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.rng import seeded, seeded_host
from megatron_lightning.pipeline.batch.microbatches import tensors_of
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.stages import crossing_errors as errors
from megatron_lightning.pipeline.stages.dependencies import CallFacts, DependencyTrace, StageCall
from megatron_lightning.pipeline.stages.dependency_run import CallAnalysis, intercepted
from megatron_lightning.pipeline.stages.fields import map_tensors
from megatron_lightning.pipeline.stages.parallel_call import replaced_attribute
from megatron_lightning.pipeline.stages.preludes import PreludeCalls, call_index, position_of
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.structure import (
    Containers,
    Like,
    Placeholders,
    Structure,
    dump,
    flatten,
    num_writes,
    user_hooks,
    with_hooks,
)
from megatron_lightning.pipeline.stages.unit_values import AbsentValues


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
        self._seed = 0
        self._stage_call = StageCall(0, 0, 0, (), {}, {}, None, True, 0, PreludeCalls(0))
        self._stage_calls: dict[tuple[int, int], StageCall] = {}
        self._signature: Hashable = None
        self._analysis: CallAnalysis | None = None
        self._trace: DependencyTrace | None = None  # follows the call of a run without values
        self._tests = False
        # Every value that depends on a placeholder is wrong, and NaN shows the error.
        self._placeholders = Placeholders(float("nan"), context.device)
        self._recomputes = False
        self._absent = AbsentValues()
        self._is_suspended = False
        self._forward = partition.module.forward
        self._num_preludes = len(partition.preludes)

    # ------------------------------------------------------------------------------- of the program

    def is_last(self, stage: int) -> bool:
        """Return whether the step runs to the end on ``stage``."""
        return stage == len(self._partition.stages) - 1

    @property
    def crossed(self) -> bool:
        """Whether the step has called the module since :meth:`enter`."""
        return self._stage_call.entered

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Intercept the module and the module's units inside the block."""
        module = self._partition.module
        replica = 1_000_003 * self._context.dp.rank
        stream = "training-seeds" if self._hook == "training_step" else "evaluation-seeds"
        self._seed = self._context.rng.draw_seed(stream) + replica
        with ExitStack() as undo:
            undo.enter_context(replaced_attribute(module, "forward", self.cross))
            for index, name in enumerate(self._partition.units):
                unit = module.get_submodule(name)
                undo.enter_context(intercepted(unit, partial(self._call_unit, index, unit)))
            for position, name in enumerate(self._partition.preludes):
                prelude = module.get_submodule(name)
                call = partial(self._call_prelude, position, prelude)
                undo.enter_context(intercepted(prelude, call))
            undo.callback(self._absent.hide)
            yield

    def enter(
        self, stage: int, microbatch: int, received: StageTensors | None, signature: Hashable
    ) -> None:
        """Set stage, micro-batch and input of the module's next call."""
        self._absent.hide()
        facts, (first, end) = self._facts, self._partition.bounds[stage]
        note = "{}" if received is None else received.note
        before = facts.structures(note) if note else {}
        tensors = iter(received or ())
        given = {
            unit: tuple(next(tensors) for _ in range(before[unit].num_tensors))
            for unit in (_among(before, facts.carried(first)) if received else ())
        }
        own_note, structures = facts.notes.get((stage, signature), (None, dict(before)))
        self._stage_call = StageCall(
            stage,
            first,
            end,
            () if self.is_last(stage) else facts.carried(end),
            given,
            structures,
            own_note,
            was_called_before=bool(note),
            seed=self._seed + microbatch * (len(self._partition.modules) + 1),
            preludes=PreludeCalls(self._num_preludes),
        )
        self._microbatch = microbatch
        self._signature = signature
        self._recomputes = False
        self._tests = self._analysis is None and stage not in facts.tested
        self._trace = self._analysis.follow() if self._analysis else None

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
        self._analysis = CallAnalysis(self._partition)
        with self._analysis.running(root):
            yield
        self._analysis.conclude(self._facts, self._context)
        self._analysis = self._trace = None

    def _learn(self) -> None:
        """Learn from the end of a forward on this stage.

        Raises:
            PipelineError: If the model's code writes into an output without having received a copy.
        """
        borrowed, self._stage_call.borrowed = self._stage_call.borrowed, []
        written = {unit for unit, tensor, version in borrowed if num_writes(tensor) != version}
        if written and not self._analysis:
            raise errors.late_write(self._partition.name_of(min(written)))
        self._facts.written |= written
        if self._analysis is not None and self._trace is not None:
            self._analysis.learn(self._trace)

    @contextmanager
    def recomputing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Enclose the backward of a stage: recomputation calls units again, in any order."""
        self._stage_call = self._stage_calls.pop((stage, microbatch), self._stage_call)
        self._recomputes = True
        self._tests = False
        try:
            yield
        finally:
            self._recomputes = False

    def check_result(self, result: Any) -> None:
        """Check that the step has not used a placeholder recorded by a hook.

        Raises:
            PipelineError: If the step's result is NaN while the module's results are not.
        """
        if not self._tests:
            return
        units = self._partition.units[: self._stage_call.first]
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
        call = self._stage_call
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
        left: list[StageExit] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._trace or nullcontext():
                    output = self._forward(*args, **kwargs)
                if self._stage_call.next < len(self._partition.units):
                    raise errors.missing_unit(
                        self._hook, self._partition.units[self._stage_call.next]
                    )
                if self._trace is not None:
                    self._trace.end([output, self._kept()])
                self._learn()
                if self._trace is not None:
                    raise StageExit(StageTensors())
            except StageExit as exit_:  # hooks of FSDP2 have to see the end of the forward
                # The traceback's frames hold the hooks of unfinished checkpoints.
                exit_.__traceback__ = None
                left.append(exit_)
                return tuple(exit_.outputs)
            return output

        watched = self._analysis.watching_draws() if self._analysis else nullcontext()
        with self._seeded(self._stage_call.seed), watched:
            output = self._run_stage(self._stage_call.stage, forward, *args, **kwargs)
        return left[0] if left else output

    def _check_placeholders(self, output: Any, args: Any, kwargs: Any) -> None:
        """Check that NaN in the placeholders has reached nothing.

        Raises:
            PipelineError: If NaN has reached an output.
        """
        call, found = (
            self._stage_call,
            output.outputs if isinstance(output, StageExit) else output,
        )
        self._facts.tested.add(call.stage)
        if not _has_nan(found) or _has_nan(call.received):
            return
        self._stage_call = replace(
            call,
            next=0,
            preludes=call.preludes.restarted(),
            sent=dict(call.sent_at_entry),
            borrowed=[],
            records=False,
        )
        placeholders, device = self._placeholders, self._context.device
        self._placeholders = Placeholders(0.0, device)
        with torch.no_grad(), self._repeated():
            again = self._run(args, kwargs)  # NaN may have other reasons
        self._stage_call = call
        self._placeholders = placeholders
        if not _has_nan(again.outputs if isinstance(again, StageExit) else again):
            raise errors.unsent_output(call.stage)

    # --------------------------------------------------------------------------------- of the units

    def _call_unit(
        self, index: int, unit: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace the call of a unit."""
        if self._is_suspended:
            return run(*args, **kwargs)
        call = self._stage_call
        if self._recomputes:
            if index >= call.end:
                raise StageExit(StageTensors())
            if index >= call.first:
                return self._run_seeded(index, run, args, kwargs)
            return self._stub(index, unit, args, kwargs)
        if not call.entered:
            self._begin()
            # Outputs can only be followed to the end of a forward, and there is none.
            self._trace = None
        if index != call.next:
            raise errors.wrong_order(self._hook, self._partition.units, index, call.next)
        call.next += 1
        if index >= call.end:
            raise StageExit(self._outputs())
        if index < call.first:
            return self._stub(index, unit, args, kwargs)
        if call.records and not torch.is_grad_enabled() and _is_trained(unit):
            raise errors.no_graph(self._partition.units[index])
        output = self._run_unit(index, unit, run, args, kwargs)
        if self._analysis and self._trace is None and call.next == len(self._partition.units):
            self._learn()
            raise StageExit(StageTensors())
        return output

    def _call_prelude(
        self, position: int, prelude: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace the call of a prelude."""
        if self._is_suspended:
            return run(*args, **kwargs)
        call, name = self._stage_call, self._partition.preludes[position]
        if self._recomputes and call.stage == 0:
            return self._run_seeded(call_index(position, 0, self._num_preludes), run, args, kwargs)
        if self._recomputes:
            index = call.preludes.only(position)
        else:
            index = call.preludes.next(position)
            if self._trace is not None and not call.entered:
                # Code before the pipelined forward is not followed.
                self._trace.use_everywhere(index)
        if call.stage == 0:
            return self._run_unit(index, prelude, run, args, kwargs)
        if index not in call.structures:
            raise errors.late_prelude(self._hook, name)
        return self._stub(index, prelude, args, kwargs)

    def _run_unit(
        self,
        index: int,
        unit: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit of this stage, and keep the outputs to send."""
        call, name = self._stage_call, self._partition.name_of(index)
        containers = Containers(args, kwargs)
        if self._trace is not None:
            seen = self._analysis.values.seen(index, unit) if self._analysis else nullcontext()
            with torch.compiler.set_stance("force_eager"), seen:
                output = self._trace.run_unit(index, unit._call_impl, args, kwargs)
        else:
            output = self._run_seeded(index, run, args, kwargs)
        changed = containers.changed(output, is_copy=self._trace is not None)
        if changed is not None:
            raise errors.changed_argument(name, changed)
        if index == len(self._partition.units) - 1:  # code behind the units is next
            before = [left for left in self._facts.left if left[0] < call.first]
            self._absent.show(before, self._partition)
        if self.is_last(call.stage) or (call.note is not None and index not in call.carried):
            return output
        tensors, structure = flatten(output, name)
        if call.note is None:
            call.structures[index] = structure
        elif index in call.structures and structure != call.structures[index]:
            raise errors.other_output(name, structure, call.structures[index])
        if index in call.carried:
            call.sent[index] = tensors
        return self._hand_out(index, output, tensors)

    def _run_seeded(
        self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if index < 0:  # the calls of a prelude share a seed: a recomputation knows no order
            position = position_of(index, self._num_preludes)
            index = len(self._partition.units) + position
        with self._seeded(self._stage_call.seed + 1 + index):
            return run(*args, **kwargs)

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed the default generators: torch's generators, and other generators used by the
        forward.
        """
        others = seeded_host(seed) if self._facts.draws_on_host else nullcontext()
        with seeded(seed, self._context.device), others:
            yield

    def _stub(
        self, index: int, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a substitute for the output of a unit before the stage."""
        call, tensors = self._stage_call, self._stage_call.received.get(index)
        structure = call.structures[index]
        if tensors is None:
            is_written = self._analysis is not None or index in self._facts.written
            tensors = tuple(
                self._placeholders.of(leaf, fresh=is_written)
                for leaf in structure.leaves
                if isinstance(leaf, Like)
            )
        elif not self._recomputes and index in call.carried:
            call.sent[index] = tensors
        output = structure.build(iter(tensors))
        if self._trace is not None:
            self._trace.mark_output(index, output)
        if not self._recomputes:
            output = self._hand_out(index, output, tensors)
        elif index in self._facts.written:
            output = map_tensors(torch.clone, output)
        return output if index < 0 else with_hooks(unit, args, kwargs, output)

    def _hand_out(self, index: int, output: Any, tensors: tuple[Tensor, ...]) -> Any:
        """Return the output for the model's code. A sent or received output is returned as a copy
        if the code writes into the output, since a recomputation needs the output again. In
        inference mode writes are not counted, so a sent output is always copied.
        """
        call = self._stage_call
        if not (index in call.sent or index in call.received or self._analysis):
            return output
        uncounted = index in call.sent and any(tensor.is_inference() for tensor in tensors)
        if uncounted or index in self._facts.written:
            return map_tensors(torch.clone, output)
        call.borrowed += [(index, tensor, num_writes(tensor)) for tensor in tensors]
        return output

    def _outputs(self) -> StageTensors:
        """Return the outputs for the next stage."""
        call, facts = self._stage_call, self._facts
        self._check_preludes()
        if self._trace is not None and call.stage == 0 and self._num_preludes:
            self._trace.keep(self._kept())
        self._learn()
        if call.note is None:
            call.note = dump(call.structures, self._partition.name_of)
            facts.notes[call.stage, self._signature] = (
                call.note,
                call.structures,
            )
        carried = () if self._analysis else _among(call.structures, call.carried)
        tensors = (tensor for unit in carried for tensor in self._sent(unit))
        outputs = StageTensors(tensors, call.note)
        call.sent = {}  # sent outputs are released
        return outputs

    def _sent(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of a unit for the next stage. Without the call of a prelude on this
        stage, the received tensors travel on.
        """
        call = self._stage_call
        return call.sent[index] if index in call.sent else call.received[index]

    def _check_preludes(self) -> None:
        """Check that the first stage has called the preludes that the next stage is prepared for.

        Raises:
            PipelineError: If the calls are others than in an earlier micro-batch.
        """
        call = self._stage_call
        if call.stage > 0:
            return
        known = {index for index in call.structures if index < 0}
        others = known ^ call.preludes.made()
        if others:
            raise errors.other_calls(self._partition.name_of(max(others)))


def _among(structures: Mapping[int, Structure], carried: Collection[int]) -> list[int]:
    """Return the carried units, and the carried calls of preludes that were made."""
    return sorted(index for index in structures if index in carried)


def _is_trained(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())


def _has_nan(tree: Any) -> bool:
    tensors = [*tensors_of(tree), *(x for x in tree_leaves(tree) if isinstance(x, Tensor))]
    # Logits that are not computed unless read stand for other values.
    values = [getattr(tensor, "stands_for", tensor) for tensor in tensors]
    return any(bool(tensor.isnan().any()) for tensor in values if tensor.is_floating_point())
