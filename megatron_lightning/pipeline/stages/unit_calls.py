"""Calls of units and preludes on a stage: run, or replaced by a substitute, and kept to be sent.

Random numbers between units are equal on all stages, since each forward is seeded at the start. A
unit draws only on the unit's own stage, from a seed of the unit's own. The unit's seed leaves the
generator between units unchanged, and a recomputation uses the seed again.

A boundary carries the output of the unit before the boundary, and every earlier output still used
behind the boundary (``dependencies``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.random.rng import seeded, seeded_host
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.stages import crossing_errors as errors
from megatron_lightning.pipeline.stages.dependencies import CallFacts, DependencyTrace, StageCall
from megatron_lightning.pipeline.stages.dependency_run import CallAnalysis
from megatron_lightning.pipeline.stages.fields import map_tensors
from megatron_lightning.pipeline.stages.preludes import PreludeCalls, position_of
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.structure import (
    Containers,
    Like,
    Placeholders,
    Structure,
    dump,
    flatten,
    num_writes,
    show_to_hooks,
)
from megatron_lightning.pipeline.stages.unit_values import AbsentValues


class UnitCalls:
    """Calls of units and preludes in the forward of a stage.

    Args:
        partition: The pipelined module and the module's stages.
        context: Groups of this rank.
        facts: Facts about this kind of call.
        kept: Returns the tensors that the step leaves outside of the output.
    """

    def __init__(
        self,
        partition: StagePartition,
        context: ParallelContext,
        facts: CallFacts,
        kept: Callable[[], Sequence[Tensor]],
    ) -> None:
        self._partition = partition
        self._context = context
        self._facts = facts
        self._kept = kept
        self._signature: Hashable = None
        self._num_preludes = len(partition.preludes)
        self.current = StageCall(0, 0, 0, (), {}, {}, None, True, 0, PreludeCalls(0))
        self.seed = 0
        self.analysis: CallAnalysis | None = None
        self.trace: DependencyTrace | None = None  # follows the call of a run without values
        # Every value that depends on a placeholder is wrong, and NaN shows the error.
        self.placeholders = Placeholders(float("nan"), context.device)
        self.absent = AbsentValues()
        self.is_recomputing = False

    def enter(
        self, stage: int, microbatch: int, received: StageTensors | None, signature: Hashable
    ) -> None:
        """Set stage, micro-batch and input of the module's next call."""
        self.absent.hide()
        facts, (first, end) = self._facts, self._partition.bounds[stage]
        # The note of a message says which units' outputs the flat list of tensors holds, and how
        # these outputs are structured. Micro-batches of one signature have equal notes.
        note = "{}" if received is None else received.note
        structures_before = facts.structures(note) if note else {}
        tensors = iter(received or ())
        inputs_of_units = {
            unit: tuple(next(tensors) for _ in range(structures_before[unit].num_tensors))
            for unit in (_among(structures_before, facts.carried(first)) if received else ())
        }
        own_note, structures = facts.notes.get((stage, signature), (None, dict(structures_before)))
        self.current = StageCall(
            stage,
            first,
            end,
            () if self._partition.is_last(stage) else facts.carried(end),
            inputs_of_units,
            structures,
            own_note,
            was_called_before=bool(note),
            # One seed a module and micro-batch, with one for the code between: no two of a step
            # share a seed.
            seed=self.seed + microbatch * (len(self._partition.modules) + 1),
            preludes=PreludeCalls(self._num_preludes),
        )
        self._signature = signature
        self.is_recomputing = False
        self.trace = self.analysis.follow() if self.analysis else None

    def learn(self) -> None:
        """Learn from the end of a forward on this stage.

        Raises:
            PipelineError: If the model's code writes into an output without having received a copy.
        """
        borrowed, self.current.borrowed = self.current.borrowed, []
        written_units = {
            unit for unit, tensor, version in borrowed if num_writes(tensor) != version
        }
        if written_units and not self.analysis:
            raise errors.late_write(self._partition.name_of(min(written_units)))
        self._facts.written |= written_units
        if self.analysis is not None and self.trace is not None:
            self.analysis.learn(self.trace)

    def run(
        self,
        index: int,
        unit: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit of this stage, and keep the outputs to send."""
        call, name = self.current, self._partition.name_of(index)
        containers = Containers(args, kwargs)
        # A dependency run follows operations, which compiled graphs would hide.
        if self.trace is not None:
            watching = self.analysis.values.seen(index, unit) if self.analysis else nullcontext()
            with torch.compiler.set_stance("force_eager"), watching:
                output = self.trace.run_unit(index, unit._call_impl, args, kwargs)
        else:
            output = self.run_seeded(index, run, args, kwargs)
        # A list or dict written by a unit is a side channel: units on other stages would not see
        # it.
        changed = containers.changed(output, is_copy=self.trace is not None)
        if changed is not None:
            raise errors.changed_argument(name, changed)
        if index == len(self._partition.units) - 1:  # code behind the units is next
            left_before = [entry for entry in self._facts.left if entry[0] < call.first]
            self.absent.show(left_before, self._partition)
        # The last stage sends nothing. Once the note is known, neither do units that nothing behind
        # the boundary reads.
        if self._partition.is_last(call.stage) or (
            call.note is not None and index not in call.carried
        ):
            return output
        tensors, structure = flatten(output, name)
        if call.note is None:
            call.structures[index] = structure
        elif index in call.structures and structure != call.structures[index]:
            raise errors.other_output(name, structure, call.structures[index])
        if index in call.carried:
            call.sent[index] = tensors
        return self._hand_out(index, output, tensors)

    def run_seeded(
        self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit, or a prelude, from a seed of its own."""
        if index < 0:  # the calls of a prelude share a seed: a recomputation knows no order
            position = position_of(index, self._num_preludes)
            index = len(self._partition.units) + position
        with self.seeded(self.current.seed + 1 + index):
            return run(*args, **kwargs)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the default generators: torch's generators, and other generators used by the
        forward.
        """
        host_context = seeded_host(seed) if self._facts.draws_on_host else nullcontext()
        with seeded(seed, self._context.device), host_context:
            yield

    def stub(
        self, index: int, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a substitute for the output of a unit before the stage."""
        call, tensors = self.current, self.current.received.get(index)
        structure = call.structures[index]
        if tensors is None:
            is_written = self.analysis is not None or index in self._facts.written
            tensors = tuple(
                self.placeholders.of(leaf, fresh=is_written)
                for leaf in structure.leaves
                if isinstance(leaf, Like)
            )
        elif not self.is_recomputing and index in call.carried:
            call.sent[index] = tensors
        output = structure.build(iter(tensors))
        if self.trace is not None:
            self.trace.mark_output(index, output)
        if not self.is_recomputing:
            output = self._hand_out(index, output, tensors)
        elif index in self._facts.written:
            output = map_tensors(torch.clone, output)
        if index >= 0 and unit._forward_hooks:
            is_written = index in self._facts.written  # by a hook, perhaps
            shown = map_tensors(torch.clone, output) if is_written else output
            show_to_hooks(unit, args, kwargs, shown)
        return output

    def _hand_out(self, index: int, output: Any, tensors: tuple[Tensor, ...]) -> Any:
        """Return the output for the model's code. A sent or received output is returned as a copy
        if the code writes into the output, since a recomputation needs the output again. In
        inference mode writes are not counted, so a sent output is always copied.
        """
        call = self.current
        if not (index in call.sent or index in call.received or self.analysis):
            return output
        uncounted = index in call.sent and any(tensor.is_inference() for tensor in tensors)
        if uncounted or index in self._facts.written:
            return map_tensors(torch.clone, output)
        call.borrowed += [(index, tensor, num_writes(tensor)) for tensor in tensors]
        return output

    def outputs(self) -> StageTensors:
        """Return the outputs for the next stage."""
        call, facts = self.current, self._facts
        self._check_preludes()
        if self.trace is not None and call.stage == 0 and self._num_preludes:
            self.trace.keep(self._kept())
        self.learn()
        if call.note is None:
            call.note = dump(call.structures, self._partition.name_of)
            facts.notes[call.stage, self._signature] = (call.note, call.structures)
        carried = () if self.analysis else _among(call.structures, call.carried)
        tensors = (tensor for unit in carried for tensor in self._sent(unit))
        outputs = StageTensors(tensors, call.note)
        call.sent = {}  # sent outputs are released
        return outputs

    def _sent(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of a unit for the next stage. Without the call of a prelude on this
        stage, the received tensors travel on.
        """
        call = self.current
        return call.sent[index] if index in call.sent else call.received[index]

    def _check_preludes(self) -> None:
        """Check that the first stage has called the preludes that the next stage is prepared for.

        Raises:
            PipelineError: If the calls are others than in an earlier micro-batch.
        """
        call = self.current
        if call.stage > 0:
            return
        known_preludes = {index for index in call.structures if index < 0}
        differing = known_preludes ^ call.preludes.made()
        if differing:
            raise errors.other_calls(self._partition.name_of(max(differing)))


def _among(structures: Mapping[int, Structure], carried: Collection[int]) -> list[int]:
    """Return the carried units, and the carried calls of preludes that were made."""
    return sorted(index for index in structures if index in carried)
