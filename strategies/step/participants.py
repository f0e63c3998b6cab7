"""The ordered list of all participants in the steps of a run. A new concern is a line here.

Order matters in four places. Hooks may have written buffers and weights, so both are shared before
batches are compared. Values and random states of a stage are entered before other contexts of the
stage's forward. Log calls are replayed after the logged values are applied, and before layers log.
Participants with a veto are asked before other participants follow the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lightning.assembly.buffers.buffer_broadcast import BufferSync
from megatron_lightning.guards.guard import Guard
from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.step.explanations import Explanations
from megatron_lightning.step.forward_times import ForwardTimes, step_watches
from megatron_lightning.step.gradients.expert_updates import ExpertUpdates
from megatron_lightning.step.gradients.finite_check import FiniteCheck
from megatron_lightning.step.gradients.update_judges import UpdateJudges, update_judges
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.repeats.recorded_step import RecordedStep
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.values.buffer_values import BufferValues
from megatron_lightning.step.values.logs import StepLogs
from megatron_lightning.step.values.metric_states import MetricStates
from megatron_lightning.step.values.module_values import ModuleValues
from megatron_lightning.step.values.random_states import RandomStates
from megatron_lightning.step.values.reports import StepReports
from megatron_lightning.step.values.sequence_parts import SequenceParts
from megatron_lightning.step.written_weights import WrittenWeights
from megatron_lightning.strategies.step.loaders.consumed_samples import ConsumedSamples
from megatron_lightning.strategies.step.precision_contexts import PrecisionContexts, UnitOrder
from megatron_lightning.strategies.step.rounded_weights import RoundedWeights
from megatron_lightning.strategies.step.training import Training


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """Parts of a run's steps with uses outside of a step, too."""

    buffers: BufferSync
    """Keeps buffers equal on all ranks with the same buffer."""
    metrics: MetricSync
    """Synchronizes metrics."""
    guards: Sequence[Guard]
    """Guards of this run."""
    sequence: SequenceParts | None
    """Divides sequences. None: every rank has full sequences."""
    inputs: RecordedStep
    """Records the inputs of training steps."""


def step_participants(
    scope: RunContext, parts: SharedParts, training: Training | None
) -> Iterator[StepParticipant]:
    """Yield the participants of a run in order.

    Args:
        scope: The run context.
        parts: Parts with uses outside of steps, too.
        training: Gradients and optimizer steps. None: the run does not fit.
    """
    partition, options = scope.part.partition, scope.options
    # Enclosing concerns come first: buffers and weights are settled before anything reads them.
    yield BufferValues(parts.buffers, at_end=not options.is_native)
    if training is not None:
        yield WrittenWeights(training.accumulation)
    yield MetricStates(parts.metrics)
    yield from parts.guards
    yield Explanations(scope)
    if training is not None:
        yield ConsumedSamples(scope, training.schedules)
        yield parts.inputs
    # Values and random states that user code may change follow the checks of the batch, and precede
    # the contexts of a forward.
    if partition is not None:
        yield ModuleValues(scope, partition)
        yield RandomStates(scope)
    if parts.sequence is not None:
        yield parts.sequence
    yield PrecisionContexts(scope)
    yield from RoundedWeights.of(scope)
    if partition is None:
        yield UnitOrder(scope)
    if not options.is_native:
        yield StepLogs(scope)
    yield StepReports(scope)
    if options.is_native and (watches := step_watches(scope.module.trainer)):
        yield ForwardTimes(watches)
    if training is not None:
        if options.non_finite != "ignore":
            scaling = training.loss_scaling
            scale = None if scaling is None else scaling.loss_scale
            yield FiniteCheck(scope, options.non_finite, scale)
        if judges := update_judges(scope.module.trainer):
            yield UpdateJudges(scope, judges, training.unscaled_norm)
        yield ExpertUpdates(scope)
