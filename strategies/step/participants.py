"""The ordered list of all participants in the steps of a run. A new concern is a line here.

Order matters in four places. Hooks may have written buffers and weights, so both are shared before
batches are compared. Values and random states of a stage are entered before other contexts of the
stage's forward. Log calls are replayed after the logged values are applied, and before layers log.
Participants with a veto are asked before other participants follow the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lightning.assembly.buffers.buffer_broadcast import BufferSync
from megatron_lightning.assembly.fsdp import is_sharded
from megatron_lightning.assembly.plan_watch import PlanWatch
from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.strategies.step.checks.agreement import Agreement
from megatron_lightning.strategies.step.checks.first_batches import FirstBatches
from megatron_lightning.strategies.step.checks.hints import StepHints
from megatron_lightning.strategies.step.checks.hook_comparison import HookComparison
from megatron_lightning.strategies.step.checks.hook_logs import HookLogs
from megatron_lightning.strategies.step.checks.plan_comparison import PlanComparison
from megatron_lightning.strategies.step.checks.trained_parameters import TrainedParameters
from megatron_lightning.strategies.step.checks.unit_shards import UnitShards
from megatron_lightning.strategies.step.checks.user_hooks import UserHooks
from megatron_lightning.strategies.step.checks.world_guard import WorldGuard
from megatron_lightning.strategies.step.checks.written_weights import WrittenWeights
from megatron_lightning.strategies.step.forward_times import ForwardTimes, step_watches
from megatron_lightning.strategies.step.gradients.expert_updates import ExpertUpdates
from megatron_lightning.strategies.step.gradients.finite_check import FiniteCheck
from megatron_lightning.strategies.step.gradients.training import Training
from megatron_lightning.strategies.step.gradients.update_judges import UpdateJudges, update_judges
from megatron_lightning.strategies.step.loaders.consumed_samples import ConsumedSamples
from megatron_lightning.strategies.step.participant import StepParticipant
from megatron_lightning.strategies.step.precision_contexts import PrecisionContexts, UnitOrder
from megatron_lightning.strategies.step.rerun import StepInputs
from megatron_lightning.strategies.step.run_context import RunContext
from megatron_lightning.strategies.step.values.buffer_values import BufferValues
from megatron_lightning.strategies.step.values.logs import StepLogs
from megatron_lightning.strategies.step.values.metric_states import MetricStates
from megatron_lightning.strategies.step.values.module_values import ModuleValues
from megatron_lightning.strategies.step.values.random_states import RandomStates
from megatron_lightning.strategies.step.values.reports import StepReports
from megatron_lightning.strategies.step.values.sequence_parts import SequenceParts


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """Parts of a run's steps with uses outside of a step, too."""

    buffers: BufferSync
    """Keeps buffers equal on all ranks with the same buffer."""
    metrics: MetricSync
    """Synchronizes metrics."""
    guard: WorldGuard
    """Watches the default process group."""
    sequence: SequenceParts | None
    """Divides sequences. None: every rank has full sequences."""
    inputs: StepInputs
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
    watch = None if training is None else _plan_watch(scope)
    # Enclosing concerns come first: buffers and weights are settled before anything reads them.
    yield BufferValues(parts.buffers, at_end=not options.is_native)
    if training is not None and watch is not None:
        yield WrittenWeights(scope, training.accumulation, training.optimizers, watch)
    yield MetricStates(parts.metrics)
    if scope.part.units is not None:
        yield UnitShards()
    yield FirstBatches(scope, parts.guard)
    yield Agreement(scope)
    if training is not None:
        yield ConsumedSamples(scope, training.schedules)
        yield parts.inputs
    if not options.pipeline.explicit_steps:
        yield StepHints(scope)
    # Values and random states that user code may change follow the checks of the batch, and precede
    # the contexts of a forward.
    if partition is not None:
        yield ModuleValues(scope, partition)
        yield RandomStates(scope)
    if parts.sequence is not None:
        yield parts.sequence
    yield PrecisionContexts(scope)
    if partition is None:
        yield UnitOrder(scope)
    if not options.is_native:
        yield StepLogs(scope)
    yield StepReports(scope)
    # Judgments come last, when the step's values and gradients are complete.
    yield from _of_hooks(scope, parts.guard, fits=training is not None)
    if options.is_native and (watches := step_watches(scope.module.trainer)):
        yield ForwardTimes(watches)
    if training is not None and watch is not None:
        yield PlanComparison(watch)
        if options.non_finite != "ignore":
            yield FiniteCheck(scope, options.non_finite, training.loss_scaling)
        if judges := update_judges(scope.module.trainer):
            yield UpdateJudges(scope, training, judges)
        yield TrainedParameters(scope, training.accumulation)
        yield ExpertUpdates(scope)


def _of_hooks(scope: RunContext, guard: WorldGuard, *, fits: bool) -> Iterator[StepParticipant]:
    """Yield participants that compare the ranks of a replica after hooks of the user."""
    if scope.context.tp.size > 1:
        yield HookComparison(scope)
    has_copies = scope.context.layout.replica_size > 1
    if has_copies or is_sharded(scope.module):
        yield UserHooks(scope, guard)
        if fits and has_copies:
            yield HookLogs(scope)


def _plan_watch(scope: RunContext) -> PlanWatch:
    """Return the detector of faults in a sharding plan, for the first steps."""
    watch = PlanWatch(scope.module, scope.part, scope.context)
    scope.undo.callback(watch.detach)
    return watch
