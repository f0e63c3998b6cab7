"""Run a schedule's table on this rank. The executor decides nothing: the table determines the
order, the program the computation, and a :class:`PipelineRun` messages and memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_lightning.errors import PipelineError, add_note
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.channel import Boundary, Transport
from megatron_lightning.pipeline.message_plan import Plan, plan_of
from megatron_lightning.pipeline.pipeline_run import (
    BoundaryKey,
    PipelineRun,
    Signatures,
    StageProgram,
)
from megatron_lightning.pipeline.schedules import forward_only
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.weight_gradients import WeightGradients


class Observer(Protocol):
    """Observer of the actions of a rank."""

    def begin(self, action: Action) -> None:
        """Observe the start of an action, after the action's message has arrived."""
        ...

    def end(self, action: Action, outputs: tuple[Tensor, ...] | Tensor | None) -> None:
        """Observe the end of an action and a forward's outputs: tensors for the next stage, or the
        loss. None for other actions.
        """
        ...


@dataclass(frozen=True)
class PipelinePosition:
    """Position of an error in a pipeline run. The error carries the position as
    ``pipeline_position``.
    """

    rank: int
    """Global rank."""
    pp_rank: int
    """Pipeline rank."""
    action: Action

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (pp rank {self.pp_rank}) was at stage {self.action.stage}, action "
            f"{self.action}, micro-batch {self.action.microbatch}"
        )


@dataclass
class KnownBoundaries:
    """Shapes of the messages between stages, by signature."""

    boundaries: dict[BoundaryKey, Boundary] = field(default_factory=dict)
    """Metadata of the tensors received by stages."""
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """Numbers of the signatures, since signatures may be slow to compare."""

    def forget(self) -> None:
        """Drop all, on all ranks of the pipeline together: the next run sends headers again."""
        self.boundaries.clear()
        self.numbers.clear()


class PipelineExecutor:
    """Executor of schedules on the pipeline of a context.

    Creating an executor is collective over the pipeline group.

    Args:
        context: Groups of this rank.
        placement: Map from stages to pipeline ranks.
    """

    def __init__(self, context: ParallelContext, placement: Placement) -> None:
        self.context = context
        self.placement = placement
        self.transport = Transport(context, placement)
        self._known = KnownBoundaries()
        self.weight_gradients = WeightGradients()
        """Store for deferred weight gradients while a backward is split."""
        self.observers: list[Observer] = []
        """Observers of the actions, called in this order."""
        self._plans: dict[tuple[int, bool], tuple[Schedule, Plan]] = {}

    def forget_boundaries(self) -> None:
        """Drop the known shapes, on all ranks of the pipeline together, so that the next run sends
        headers again.

        Needed when a signature may from now on mean other shapes or gradients, such as after layers
        were frozen or unfrozen.
        """
        self._known.forget()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Add ``observer`` inside the block."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def run(
        self,
        schedule: Schedule,
        program: StageProgram,
        *,
        backward: bool = True,
        asks_when_due: bool = False,
        known: KnownBoundaries | None = None,
    ) -> None:
        """Run a schedule.

        Args:
            schedule: A valid table on this executor's placement.
            program: Computation of the stages, called in the order of the table.
            backward: Whether to run backwards. False runs the table's forwards alone, in order.
            asks_when_due: Whether to ask for the signature of a micro-batch only when the
                micro-batch's action is due: the signature may follow from results of earlier
                micro-batches. False: all signatures are asked for now.
            known: Shapes of messages learned by earlier runs of the same program. None: shapes of
                trainings. All ranks of the pipeline pass the same.

        Raises:
            PipelineError: If the table does not fit, or a stage sends other tensors than an equal
                signature had.
            Exception: Any exception of the program, with the position in the schedule added.
        """
        if schedule.placement != self.placement:
            raise PipelineError(
                f"schedule {schedule.name} is for the placement {schedule.placement.pp_ranks}, and "
                f"this pipeline has {self.placement.pp_ranks}. Make the schedule for this pipeline."
            )
        known = self._known if known is None else known
        plan, numbers = self._plan(schedule, backward), known.numbers

        def number_of(microbatch: int) -> int:
            return numbers.setdefault(program.signature(microbatch), len(numbers))

        # Signatures are asked before the first message, since a receive is posted ahead of its
        # action. Calls that follow from earlier results (generation) can only be asked when due.
        microbatches_asked = range(0 if asks_when_due else schedule.num_microbatches)
        run = PipelineRun(
            plan,
            program,
            Signatures(number_of, microbatches_asked),
            transport=self.transport,
            boundaries=known.boundaries,
            weight_gradients=self.weight_gradients,
            backward=backward,
        )
        planned = plan.actions[0]
        outputs: tuple[Tensor, ...] | Tensor | None = None
        self.weight_gradients.begin()
        try:
            run.start()
            for planned in plan.actions:
                run.signatures.ask(planned.action.microbatch)
                # Order: inputs are taken before observers begin, so that a timeline shows the wait
                # for a message as idle time and not as work.
                action, inputs = planned.action, run.take(planned.takes)
                for observer in self.observers:
                    observer.begin(action)
                with program.completing(action.stage) if planned.completes else nullcontext():
                    if action.kind is Kind.FORWARD:
                        outputs = run.forward(planned, inputs)
                    else:
                        run.backward(planned, inputs)
                for observer in self.observers:
                    observer.end(action, outputs)
                outputs = None  # the graph keeps the values needed by backward
            run.finish()
        except Exception as error:
            self.weight_gradients.clear()
            _locate(
                error, PipelinePosition(self.context.rank, self.context.pp.rank, planned.action)
            )
            raise

    def _plan(self, schedule: Schedule, backward: bool) -> Plan:
        """Return this rank's plan, cached with the plan's table, so that no other table gets the
        same id.
        """
        key = (id(schedule), backward)
        if key not in self._plans:
            table = schedule if backward else forward_only(schedule)
            self._plans[key] = (schedule, plan_of(table, self.context.pp.rank))
        return self._plans[key][1]


def _locate(error: Exception, position: PipelinePosition) -> None:
    """Add the position to an error, and keep the error's type."""
    vars(error)["pipeline_position"] = position
    add_note(error, str(position))
