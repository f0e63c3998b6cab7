"""All guards, in the order in which a step asks them. A new guard is a file and a line here, and a
name in ``config.training.GUARDS``.
"""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.gradients.left_gradients import LeftGradients
from megatron_lightning.guards.gradients.sharded_gradients import ShardedGradients
from megatron_lightning.guards.gradients.unreduced_gradients import UnreducedGradients
from megatron_lightning.guards.gradients.zero_grad import ZeroGrad
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.hooks.averages import Averages
from megatron_lightning.guards.hooks.equal_draws import EqualDraws
from megatron_lightning.guards.hooks.hook_draws import HookDraws
from megatron_lightning.guards.hooks.module_hooks import ModuleHooks
from megatron_lightning.guards.hooks.rank_agreement import RankAgreement
from megatron_lightning.guards.hooks.shard_writes import ShardWrites
from megatron_lightning.guards.part_saving import PartSaving
from megatron_lightning.guards.steps.context_attention import ContextAttention
from megatron_lightning.guards.steps.fsdp_shards import FsdpShards
from megatron_lightning.guards.steps.same_batches import SameBatches
from megatron_lightning.guards.steps.same_steps import SameSteps
from megatron_lightning.guards.steps.sequence_positions import SequencePositions
from megatron_lightning.guards.steps.sharding_plan import ShardingPlanValues
from megatron_lightning.guards.steps.step_hints import StepHints
from megatron_lightning.guards.steps.trained_parameters import TrainedParameters
from megatron_lightning.guards.steps.world_collectives import WorldCollectives
from megatron_lightning.step.run_context import RunContext

TABLE: tuple[type[Guard], ...] = (
    EqualDraws,
    ShardWrites,
    Averages,
    FsdpShards,
    SameBatches,
    WorldCollectives,
    RankAgreement,
    StepHints,
    ModuleHooks,
    HookDraws,
    ShardingPlanValues,
    ContextAttention,
    SequencePositions,
    SameSteps,
    UnreducedGradients,
    ShardedGradients,
    LeftGradients,
    ZeroGrad,
    TrainedParameters,
    PartSaving,
)


def make_guards(scope: RunContext, fit: Fit | None) -> list[Guard]:
    """Return the guards of a run. A collective.

    Raises:
        ConfigError: If ranks have different guards. Messages of the last stage would be
            misunderstood.
    """
    options = scope.options.guards
    kinds = [kind for kind in TABLE if kind.is_on(options) and kind.applies(scope, fit)]
    names = [kind.title() for kind in kinds]
    by_rank = scope.context.axis("world").all_gather_object(names)
    for rank, others in enumerate(by_rank):
        if others != names:
            differing = ", ".join(sorted(set(others) ^ set(names)))
            raise ConfigError(
                f"rank {rank} has other guards than rank {scope.context.rank}: {differing}. "
                "Guards compare ranks, so that all ranks need the same. Set guards of "
                "MegatronStrategy to the same value on all ranks."
            )
    return [kind(scope, fit) for kind in kinds]


def describe() -> str:
    """Return the table of ``docs/differences.md``, one row a guard, by name."""
    rows = ["| guard | finding | with `warn` |", "|---|---|---|"]
    for kind in sorted(TABLE, key=lambda kind: kind.title()):
        response = "warns" if kind.may_warn else "refuses"
        rows.append(f"| `{kind.title()}` | {kind.sentence} | {response} |")
    return "\n".join(rows)
