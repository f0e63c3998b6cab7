"""Checks of a full module and its layers against the layout, before this rank's part is taken of it.

All ranks run them on the same full module, so that all find the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_lightning.config import PipelineOptions, RecomputeOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.recompute import check_patterns
from megatron_lightning.parallel.sharding import ShardingPlan, sharding_plans, shared_names
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.layouts import cut_units
from megatron_lightning.pipeline.partition import unit_names
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.pipeline.stage import check_units, find_pipelined_module, pipeline_units


def check_cut(module: nn.Module, placement: Placement, options: PipelineOptions, *, is_built: bool) -> None:
    """Check that the model can be cut into stages as the user wants, as far as its layers are known before it exists.

    Args:
        module: The full module.
        placement: Where the stages live.
        options: How the model is cut.
        is_built: Whether its layers exist already.

    Raises:
        ConfigError: If no submodule, or more than one, has ``pipeline_units()``, or these do not fit the model or the stages.
    """
    config = getattr(module, "config", None)
    path = None
    if any(hasattr(child, "pipeline_units") for child in module.modules()):
        path, pipelined = find_pipelined_module(module)
        units = pipeline_units(pipelined)
        if placement.num_stages > 1:
            check_units(pipelined, unit_names(units))
    elif placement.num_stages > 1 and is_built:
        find_pipelined_module(module)  # says what is missing
        return
    elif isinstance(config, TransformerConfig):
        units = ["embedding", *(f"layers.{index}" for index in range(config.num_layers)), "output_layer"]
    else:
        return
    if options != PipelineOptions() or placement.num_stages > 1:
        stages = cut_units(units, placement, options)
        if path is not None:
            check_ties(module, path, stages, placement)


def check_ties(module: nn.Module, path: str, stages: Sequence[Sequence[str]], placement: Placement) -> None:
    """Check that parameters which two stages share lie where their gradients can be added up.

    Args:
        module: The whole LightningModule.
        path: Where the pipelined module is in it.
        stages: Unit paths of every stage.
        placement: Where the stages live.

    Raises:
        ConfigError: Naming the parameters and their pipeline ranks.
    """
    prefix, ends = f"{path}." if path else "", {0, placement.num_coordinates - 1}
    where = {f"{prefix}{unit}": placement.coordinates[index] for index, units in enumerate(stages) for unit in units}
    for names in shared_names(module):
        ranks = {name: rank for name in names for unit, rank in where.items() if name == unit or name.startswith(f"{unit}.")}
        if len(set(ranks.values())) > 1 and not ends.issuperset(ranks.values()):
            raise ConfigError(
                f"{' and '.join(ranks)} are one parameter and would lie on the pipeline ranks {list(ranks.values())}. Only the "
                f"first and the last of the {placement.num_coordinates} ranks add up the gradients of such parameters. Put the "
                "units that share it on one rank (pipeline_options), or give each its own parameter."
            )


def check_sharded_units(module: nn.Module) -> None:
    """Check that FSDP2 finds units to shard.

    Raises:
        ConfigError: For a model without ``pipeline_units()``.
    """
    try:
        find_pipelined_module(module)
    except ConfigError as error:
        raise ConfigError(
            f'data_parallel="fsdp" shards the units that a model lists in pipeline_units(), and {type(module).__name__} '
            "does not have exactly one submodule with that method. Give it to the model that the step calls, or set "
            'data_parallel="zero1".'
        ) from error


def check_layers(module: nn.Module, recompute: RecomputeOptions, *, tensor_size: int) -> None:
    """Check all layers of the module.

    Args:
        module: With all its layers.
        recompute: What names some of them.
        tensor_size: Tensor-parallel ranks that the module's own tables are for.

    Raises:
        ConfigError: For names that match nothing, layers that cannot be recomputed together, and a module without a table.
    """
    check_patterns(module, recompute)
    if tensor_size > 1:
        find_tables(module, tensor_size)


def check_trained_layers(module: nn.Module, schedule: ScheduleChoice, num_replicas: int, *, sharded: bool = False) -> None:
    """Check what all layers of the module do in training.

    Args:
        module: With all its layers.
        schedule: What they will run in.
        num_replicas: Size of data parallelism.
        sharded: Whether FSDP2 shards them.

    Raises:
        ConfigError: For sparse gradients over several replicas, and sharded, compiled layers that should put off gradients.
    """
    if num_replicas > 1:
        _check_dense_gradients(module, num_replicas)
    if sharded and num_replicas > 1 and schedule.splits_backward:
        _check_uncompiled(module, schedule)


def _check_dense_gradients(module: nn.Module, num_replicas: int) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ConfigError(
                f"{name} has sparse=True, and its gradients are reduced over {num_replicas} data-parallel ranks in buffers, "
                "which are dense. Set sparse=False, or use one data-parallel rank."
            )


def _check_uncompiled(module: nn.Module, schedule: ScheduleChoice) -> None:
    """Check that no layer is compiled: one puts off with a view of its parameter, in whose place FSDP2 has another."""
    compiled = next((name for name, child in module.named_modules() if child._compiled_call_impl is not None), None)
    if compiled is not None:
        raise ConfigError(
            f"{compiled or type(module).__name__} is compiled, schedule {schedule} puts off weight gradients, and "
            'data_parallel="fsdp" replaces the weights that a compiled layer would put them off with. Set data_parallel to '
            '"zero1", or pipeline_schedule to "1f1b" or "interleaved", or do not compile.'
        )


def find_tables(module: nn.Module, tensor_size: int) -> dict[str, ShardingPlan]:
    """Return the tensor-parallel tables of the modules that have one, by their paths.

    Raises:
        ConfigError: If there is none.
    """
    found = sharding_plans(module)
    if not found:
        raise ConfigError(
            f"tensor_model_parallel_size is {tensor_size}, and no module of {type(module).__name__} says how it is split "
            "over ranks. Give the model a method sharding_plan() that returns a ShardingPlan, pass "
            "MegatronStrategy(sharding_plan=...), or set tensor_model_parallel_size to 1."
        )
    return found
