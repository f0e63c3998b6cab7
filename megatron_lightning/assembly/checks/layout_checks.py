"""Checks of a full module and the module's layers against the layout. All ranks run the checks on
the same module before assembly.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megatron_lightning.assembly.checks.dealt_rows import check_chunks, why_two_chunks
from megatron_lightning.assembly.plans import PlanChoice, resolve_plans
from megatron_lightning.assembly.sharded_modules import find_sharded
from megatron_lightning.config import (
    ContextOptions,
    PipelineOptions,
    RecomputeOptions,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.state.recompute import check_patterns
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.units import find_pipelined


def check_shared(
    partition: StagePartition, path: str, plans: Mapping[str, ShardingPlan], tensor_size: int
) -> None:
    """Check that no parameter replicated over pp is sharded over tensor-parallel ranks.

    Args:
        partition: The pipelined module and the module's stages.
        path: Path of the pipelined module.
        plans: Sharding plans by the path of their module.
        tensor_size: Tensor-parallel ranks.

    Raises:
        ConfigError: Naming the parameter.
    """
    for name in sorted(partition.replicated_over_pp) if tensor_size > 1 else ():
        owner = ".".join(filter(None, [path, name.rpartition(".")[0]]))
        for root, plan in plans.items():
            prefix = f"{root}." if root else ""
            if owner.startswith(prefix) and plan.style_of(owner.removeprefix(prefix)) is not None:
                raise ConfigError(
                    f"{name} is used on several pipeline stages, and its sharding plan divides it "
                    f"over {tensor_size} tensor-parallel ranks, which cannot be combined. If the "
                    "forward reads it on the first and the last stage only, an example_input_array "
                    "of the LightningModule shows it; else set tensor_model_parallel_size or "
                    "pipeline_model_parallel_size to 1."
                )


def check_experts(specs: Mapping[str, ShardSpec], context: ParallelContext) -> None:
    """Check that the module has experts if the layout divides experts. A collective of the pipeline
    ranks.

    Args:
        specs: Specs of this rank's parameters.
        context: Groups of this rank.

    Raises:
        ConfigError: On all ranks, if no parameter of the model is an expert's.
    """
    layout = context.layout
    if not layout.divides_experts:
        return
    mine = any(spec.is_expert for spec in specs.values())
    if not any(context.pp.all_gather_object(mine)):
        raise ConfigError(
            f"expert_model_parallel_size={layout.ep} and expert_tensor_parallel_size={layout.etp} "
            "divide experts, and no parameter of the model is split over ep or etp by its sharding "
            "plan. Add rows for the experts to the plan, or leave both sizes unset."
        )


def check_sharded_units(module: nn.Module, options: PipelineOptions, num_stages: int) -> None:
    """Check that FSDP2 has modules to shard.

    Raises:
        ConfigError: If a pipeline finds no units, or if nothing can be sharded without a pipeline.
    """
    if num_stages > 1:
        find_pipelined(module, options.units or ())
    else:
        find_sharded(module, options)


def check_layers(
    module: nn.Module,
    recompute: RecomputeOptions,
    layout: ParallelLayout,
    plan: PlanChoice,
    sequence: ContextOptions | None = None,
) -> None:
    """Check the recomputed layers and the sharding plan of a full module.

    Raises:
        ConfigError: For names without a match, layers that cannot be recomputed together, a module
            without a plan, a plan contradicting the layout, and chunks of packed rows that a
            model does not take.
    """
    check_patterns(module, recompute)
    sequence = sequence or ContextOptions()
    plans = resolve_plans(module, layout, plan, sequence.cp_comm_type)
    if layout.cp > 1:
        check_chunks(why_two_chunks(module, plans.applied), sequence.chunks_per_rank)


def check_trained_layers(
    module: nn.Module, schedule: ScheduleChoice, num_replicas: int, *, sharded: bool = False
) -> None:
    """Check all layers of a full module for training in ``schedule`` with ``num_replicas``
    data-parallel ranks.

    Raises:
        ConfigError: For sparse gradients over several replicas, and for FSDP2-sharded, compiled
            layers with deferred weight gradients.
    """
    for name, child in module.named_modules() if num_replicas > 1 else ():
        if (
            isinstance(child, nn.Embedding | nn.EmbeddingBag)
            and child.sparse
            and child.weight.requires_grad
        ):
            raise ConfigError(
                f"{name} has sparse=True, and its gradients are reduced over {num_replicas} "
                "data-parallel ranks in buffers, which are dense. Set sparse=False, or use one "
                "data-parallel rank."
            )
        # A compiled layer defers with a view of the layer's parameter, and FSDP2 replaces the
        # parameter.
        if sharded and schedule.splits_backward and child._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} is compiled, schedule {schedule} defers weight "
                "gradients, and "
                'data_parallel="fsdp" replaces the weights that a compiled layer needs for them. '
                'Set data_parallel to "zero1", or pipeline_schedule to "1f1b" or "interleaved", or '
                "do not compile."
            )
