"""The LightningModule under a strategy: reduced to this rank's part as soon as layers exist, and
placed on this rank's device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.assemble import (
    assemble,
    can_be_partitioned,
    is_assembled,
    is_full,
    reattach,
)
from megatron_lightning.assembly.checks.replicas import check_replicas
from megatron_lightning.assembly.compile import compile_blocks, fills_cache, uncompile_blocks
from megatron_lightning.assembly.describe import describe_layout, describe_sequence_parallel
from megatron_lightning.assembly.fsdp import check_unsharded, is_sharded, local_size, shard_units
from megatron_lightning.assembly.fused_loss import fuse_losses
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.hf_models.meta_models import deferred_weights, has_pending
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.magnitude import fill_magnitudes
from megatron_lightning.layers.linear.split_backward import join_backwards, split_backwards
from megatron_lightning.layers.state.recompute import apply_recompute
from megatron_lightning.models.plans.hf_plans import set_device_mesh, transformers_models
from megatron_lightning.optim.gradients.data_groups import has_replicas
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.parameters import copy_attributes
from megatron_lightning.peft.base_digest import check_loaded_base
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.overrides import override
from megatron_lightning.strategies.checkpoint.finetuning import announces_unfreezing
from megatron_lightning.strategies.checks.module import built_module
from megatron_lightning.strategies.checks.preflight import check_layers


def wrap_configure_model(
    module: pl.LightningModule, assemble_it: Callable[[], None], undo: ExitStack
) -> None:
    """Call ``assemble_it`` when the module has all layers: now, or each time ``configure_model``
    returns.

    Callbacks copy the module in their ``setup`` hook, and a callback may call ``configure_model``
    there. The module must therefore be this rank's part when ``configure_model`` returns.
    """
    if not is_overridden("configure_model", module):
        is_complete = transformers_models(module) and not is_overridden("setup", module)
        if is_complete or can_be_partitioned(module):  # else a setup hook builds the module
            assemble_it()
        return

    def configure_model(original: Callable[[], None]) -> None:
        with deferred_weights():
            original()
        assemble_it()

    override(module, "configure_model", configure_model, undo)


def assemble_module(
    module: pl.LightningModule,
    before: Part | None,
    context: ParallelContext,
    options: StrategyOptions,
    layer_sync: LayerSync | None,
) -> Part:
    """Reduce the module to this rank's part, unless an earlier run has, and return its description.

    Args:
        module: The LightningModule with all layers, or this rank's part.
        before: Description of an earlier run.
        context: Groups of this rank.
        options: The strategy's.
        layer_sync: Lightning's plugin for BatchNorm over the replicas.
    """
    placement = options.schedule.placement
    if not is_assembled(module):
        check_layers(options, context.world_size, module, module.trainer)
    # Converted before layers are divided, as plans look at classes.
    if layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
        _synchronize_batch_norm(module, layer_sync, context.dp)
    # Under fsdp parameters stay on meta until they are shards: a rank never holds the full part.
    if is_full(module, context):
        allocates = options.data_parallel != "fsdp" or context.dp_cp.size == 1
        part = assemble(
            module, context, options.sharding_plan, placement, options.pipeline, allocates=allocates
        )
    else:
        part = reattach(module, context, placement, options.pipeline)
    if options.data_parallel != "fsdp" or context.dp_cp.size == 1:
        _read_weights(module, part, context)
    if context.tp.size > 1 and context.pp.size == 1:
        set_device_mesh(module, module.device_mesh)
    # Last: recomputation wraps the forwards of the classes that layers have now.
    apply_recompute(module, options.recompute, stages=list(part.units_of_stage.values()))
    return part if before is None else replace(part, units=before.units)


def _read_weights(module: pl.LightningModule, part: Part, context: ParallelContext) -> None:
    if has_pending(module):
        from megatron_lightning.bridge.hf_models.transformers_model import read_weights

        read_weights(module, part, context)


def place_module(
    module: pl.LightningModule,
    part: Part,
    context: ParallelContext,
    options: StrategyOptions,
    precision: Precision,
) -> Part:
    """Bring the module into its dtype, onto this rank's device and, with ``fsdp``, into this rank's
    shards.
    """
    if part.units is not None:
        part.units.reshard()
    attributes = {name: dict(vars(p)) for name, p in module.named_parameters()}
    if part.units is None or not is_sharded(module):
        check_unsharded(module)
        if precision.convert_module(module) is not module:
            raise ConfigError(
                f"{type(precision).__name__} replaces the LightningModule by another module, and "
                "the strategy divides the one that it was given. Use a precision plugin that "
                "converts the module in place."
            )
        part = replace(part, units=None)
    device: Any = context.device
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    submodules = {
        n: p for n, p in module.named_parameters() if not (isinstance(p, DTensor) or p.is_meta)
    }
    # Compared before sharding, when every rank still has what it would broadcast.
    check_replicas(submodules, part.specs, context)
    if options.data_parallel == "fsdp" and part.units is None and has_replicas(context):
        units = shard_units(
            module,
            part,
            context,
            options.data,
            options.pipeline,
            micro_batches=not options.is_native,
            keeps_frozen=not announces_unfreezing(module.trainer),
        )
        part = replace(part, units=units)
        _read_weights(module, part, context)
    module.to(device)
    # FSDP2 makes new parameters, and so does torch when moving parameters sharded by FSDP2.
    for name, parameter in module.named_parameters():
        copy_attributes(attributes.get(name, {}), parameter)
    # Lengths of rows are computed from final values.
    fill_magnitudes(module)
    check_loaded_base(ModuleState(module, part, context))
    return part


def describe_module(module: pl.LightningModule, options: StrategyOptions) -> str:
    """Return a table of the layers of a full module, built or still to be built by
    ``configure_model``.
    """
    return describe_layout(
        built_module(module),
        options.layout,
        options.sharding_plan,
        options.schedule.placement,
        options.pipeline,
    )


def print_layout(
    module: pl.LightningModule, part: Part, context: ParallelContext, options: StrategyOptions
) -> None:
    """Print layout and parameter counts on rank 0."""
    if context.world_size > 1:
        layout = options.layout
        sequence_parallel = describe_sequence_parallel(layout, part.plans)
        schedule = f", schedule {options.schedule}" if layout.num_stages > 1 else ""
        shards = "" if part.units is None else f" {part.units.describe()}"
        cp_text = f" x context {layout.cp} ({', '.join(options.sequence.cp_comm_types)})"
        experts = ""
        if layout.divides_experts:
            experts = (
                f" (experts: expert tensor {layout.etp} x expert {layout.ep} x pipeline "
                f"{layout.pp} x data {context.edp.size})"
            )
        rank_zero_info(
            f"MegatronStrategy: tensor {layout.tp}{cp_text if layout.cp > 1 else ''} x pipeline "
            f"{layout.pp} x data "
            f"{context.dp.size}{experts}, sequence parallel {sequence_parallel}, "
            f"{options.data_parallel}{schedule}. The model has {part.num_parameters:,} parameters; "
            f"this rank holds {local_size(module):,} of them.{shards}"
        )


def _synchronize_batch_norm(
    module: pl.LightningModule, layer_sync: LayerSync, replicas: AxisGroup
) -> None:
    """Convert BatchNorm layers in place to use the samples of all data-parallel replicas
    (``Trainer(sync_batchnorm=True)``).

    Lightning's own plugin would take all ranks for replicas.
    """
    if replicas.size > 1:
        if type(layer_sync) is TorchSyncBatchNorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module, replicas.process_group)  # type: ignore[no-untyped-call]
        else:
            layer_sync.apply(module)


def compile_module(
    module: pl.LightningModule, part: Part, options: StrategyOptions, undo: ExitStack
) -> None:
    """Compile the blocks of this rank until ``undo`` is closed, if the options say so."""
    if options.compile is None:
        return
    paths = compile_blocks(module, part, options.pipeline, options.compile)
    undo.callback(uncompile_blocks, module)
    rank_zero_info(
        f"MegatronStrategy: {len(paths)} blocks of this rank are compiled by "
        f"{options.compile.backend} when they first run: {', '.join(paths[:3])}"
        f"{', …' if len(paths) > 3 else ''}."
    )
    if any(map(fills_cache, module.modules())):
        rank_zero_warn(
            'compile="block" with use_cache=True: every layer asks what the cache holds for it, so '
            "that none shares a graph with another. Set model.config.use_cache = False for "
            "training."
        )


def fuse_model_losses(
    module: pl.LightningModule, options: StrategyOptions, undo: ExitStack
) -> None:
    """Compute losses of ``transformers`` models in chunks until ``undo`` is closed, if the options
    say so.
    """
    if options.fused_loss:
        fuse_losses(module, undo)


def defer_weight_gradients(
    module: pl.LightningModule,
    schedule: ScheduleChoice,
    executor: PipelineExecutor,
    undo: ExitStack,
) -> None:
    """Defer the weight gradients of linear layers until ``undo`` is closed, since the schedule
    splits backward.
    """
    split, unsplit = split_backwards(module, executor.weight_gradients)
    undo.callback(join_backwards, module)
    rank_zero_info(
        f"MegatronStrategy: schedule {schedule.name} defers the weight gradients of "
        f"{len(split)} layers on this rank. {len(unsplit)} others with matrices compute theirs "
        f"with the input gradients{': ' if unsplit else ''}{', '.join(unsplit[:5])}"
        f"{', …' if len(unsplit) > 5 else ''}."
    )
