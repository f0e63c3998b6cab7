"""Order of the checks: at the Trainer's construction, before the launch, after the module's layers
exist, and at setup.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.assembly import partition
from megatron_lightning.assembly.assemble import is_assembled
from megatron_lightning.assembly.checks import layout_checks as checks
from megatron_lightning.assembly.checks.compiler import check_compiler
from megatron_lightning.assembly.compile import check_blocks
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.peft.left_out_weights import check_adapters_only
from megatron_lightning.peft.record import check_adapters
from megatron_lightning.pipeline.batch.metrics import check_persistent_states
from megatron_lightning.pipeline.schedules.advice import advice_on_full_batches
from megatron_lightning.rules import (
    check_accumulation,
    check_compiled_shards,
    check_cp_comm_heads,
    check_data_parallel,
    check_trained_experts,
)
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.step.values.sequence_parts import sequence_dims_of
from megatron_lightning.strategies.checks.attention_kernels import check_named_backend
from megatron_lightning.strategies.checks.callbacks import (
    check_callbacks,
    check_checkpoint_links,
    warn_of_uploads,
)
from megatron_lightning.strategies.checks.data import check_batches, check_config, model_config
from megatron_lightning.strategies.checks.kinds import (
    is_distillation,
    is_finetune_data,
    is_indexed_data,
    is_rollout_data,
)
from megatron_lightning.strategies.checks.low_precision_base import check_base
from megatron_lightning.strategies.checks.module import (
    check_fused_losses,
    check_module,
    check_one_backward,
    check_param_groups,
    check_whole_graphs,
    is_built_later,
    planned_module,
)
from megatron_lightning.strategies.checks.namespaces import check_namespace
from megatron_lightning.strategies.checks.plugins import (
    check_checkpoint_io,
    check_compiled_precision,
    check_precision,
    check_quantized_storage,
    check_recipe_of,
    keeps_quantized,
)


def check_trainer(
    options: StrategyOptions,
    world_size: int,
    precision: Precision | None,
    checkpoint_io: CheckpointIO | None,
    device: torch.device,
) -> None:
    """Check the layout and the plugins, when the Trainer is constructed.

    Args:
        options: The strategy's.
        world_size: Ranks of the job.
        precision: The Trainer's plugin.
        checkpoint_io: A plugin of the user's own. None: checkpoints are sharded directories.
        device: Device of this process.

    Raises:
        ConfigError: If layout and plugins cannot work together.
    """
    grid = RankGrid(options.layout, world_size)
    check_data_parallel(grid, options.data_parallel, options.data)
    check_precision(precision, world_size)
    check_quantized_storage(precision, options.data_parallel)
    check_checkpoint_io(checkpoint_io, world_size)
    if options.compile is not None:
        check_compiler(options.compile, device)
        check_compiled_precision(precision, options.data_parallel)
        if options.schedule.splits_backward:
            num_shards, schedule = grid.size("dp-cp"), str(options.schedule)
            check_compiled_shards(options.data_parallel, num_shards, schedule)


def check_before_launch(
    options: StrategyOptions,
    world_size: int,
    module: pl.LightningModule,
    trainer: pl.Trainer | None,
    data: pl.LightningDataModule | None,
) -> None:
    """Check the known facts about the module, the Trainer and the data before any process is
    started or group created.

    Raises:
        ConfigError: If module, Trainer and data cannot run under the layout.
    """
    if trainer is not None:
        check_namespace(
            [*getattr(trainer, "callbacks", []), *getattr(trainer, "loggers", []), data]
        )
    check_config(module, options.layout, world_size, data, pipeline=options.pipeline)
    if options.layout.cp > 1:
        check_context(options, module, data)
    _check_explicit_steps(options, module)
    config = model_config(module)
    if config is not None:
        check_named_backend(config, options.layout.cp, trainer)
    check_base(options, module, trainer)
    # By an earlier Trainer: the units were checked then, and a part of the units is gone.
    if not is_assembled(module):
        planned = planned_module(module)
        _check_partition(options, planned or module, is_built=planned is not None)
        if planned is not None:
            check_layers(options, world_size, planned, trainer)
    if is_distillation(module):
        module.check_tokenizers()
    # Files are looked for before any process starts, since each rank would fail alone otherwise.
    stage = None if trainer is None else trainer.state.fn
    if stage is not None and is_indexed_data(data):
        data.check_files(stage)
    if stage not in (None, TrainerFn.PREDICTING) and (
        is_finetune_data(data) or is_rollout_data(data)
    ):
        data.check_files(stage, module)
    if stage == TrainerFn.FITTING:
        replicas = options.layout.data_parallel_size(world_size)
        check_batches(options.schedule, options.micro_batch_size, replicas, data)
        if config is not None:
            check_trained_experts(config, options.layout)
    if trainer is not None:
        _check_trained_by(options, world_size, module, trainer)


def _check_explicit_steps(options: StrategyOptions, module: pl.LightningModule) -> None:
    """Check that a module whose steps run the pipeline themselves gets full batches.

    Raises:
        ConfigError: If its steps would get micro-batches.
    """
    needs = getattr(module, "has_explicit_steps", False) and not options.is_native
    if needs and not options.pipeline.explicit_steps:
        raise ConfigError(
            f"training_step of {type(module).__name__} needs the rows of the full batch, and this "
            "layout runs it for every micro-batch. Set pipeline_options="
            "PipelineOptions(explicit_steps=True)."
        )


def check_context(
    options: StrategyOptions,
    module: pl.LightningModule,
    data: pl.LightningDataModule | None,
) -> None:
    """Check for features without support on ranks sharing a sequence.

    Raises:
        ConfigError: If such a feature is requested.
    """
    sequence_dims_of(module, data)
    config = model_config(module)
    if config is not None:
        if config.attention_dropout:
            raise ConfigError(
                f"attention_dropout={config.attention_dropout} cannot be combined with "
                f"context_parallel_size={options.layout.cp}. Set it to 0."
            )
        check_cp_comm_heads(config, options.layout, options.sequence)


def check_layers(
    options: StrategyOptions,
    world_size: int,
    module: pl.LightningModule,
    trainer: pl.Trainer | None,
) -> None:
    """Check all layers of the full module. All ranks check alike, since every rank still has all
    layers.

    Raises:
        ConfigError: If the layers cannot run under the layout.
    """
    replicas = options.layout.data_parallel_size(world_size)
    sharded = options.data_parallel == "fsdp"
    # From cheap to expensive: the last checks run the module without values.
    check_fused_losses(module, options.layout, sharded=sharded and replicas > 1)
    check_adapters_only(module, adapters_only=options.checkpoint.adapters_only)
    check_base(options, module, trainer)
    checks.check_layers(
        module,
        options.recompute,
        options.layout,
        options.sharding_plan,
        options.sequence,
    )
    if trainer is not None:
        check_recipe_of(trainer.precision_plugin, module, options.layout)
    if options.compile is not None:
        check_blocks(module, options.pipeline)
        if options.layout.cp > 1 and options.compile.fullgraph:
            check_whole_graphs(module)
    if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
        check_adapters(module)
        check_param_groups(module)
        checks.check_trained_layers(module, options.schedule, replicas, sharded=sharded)


def _check_partition(
    options: StrategyOptions, module: pl.LightningModule, *, is_built: bool
) -> None:
    """Check the stages, and warn of uneven stages unless the user has listed the stages."""
    stages = partition.check_partition(
        module, options.schedule.placement, options.pipeline, is_built=is_built
    )
    uneven = None if stages is None else stages.describe_imbalance()
    if uneven is not None and options.pipeline.pipeline_model_parallel_layout is None:
        rank_zero_warn(uneven)


def check_at_setup(
    options: StrategyOptions, world_size: int, module: pl.LightningModule, trainer: pl.Trainer
) -> None:
    """Check again after hooks that may have changed the module, and report the cost of the
    pipeline.

    Raises:
        ConfigError: If the module cannot run under the layout.
    """
    _check_trained_by(options, world_size, module, trainer)
    if options.layout.pp > 1 and options.micro_batch_size is None:
        rank_zero_warn(advice_on_full_batches(options.layout.pp))
    data = getattr(trainer, "datamodule", None)
    check_config(module, options.layout, world_size, data, pipeline=options.pipeline)


def _check_trained_by(
    options: StrategyOptions, world_size: int, module: pl.LightningModule, trainer: pl.Trainer
) -> None:
    """Check the module and the callbacks of a Trainer."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    replicas = options.layout.data_parallel_size(world_size)
    check_module(module, options.layout, options.micro_batch_size, fitting=fitting)
    overlapped = options.data.overlap_param_gather
    check_callbacks(
        trainer,
        options.layout,
        options.data_parallel,
        replicas,
        overlapped=overlapped,
        keeps_quantized=keeps_quantized(trainer.precision_plugin),
        copied=options.data.optimizer_cpu_offload
        or options.data.moments_dtype == "bf16"
        or trainer.precision in ("bf16-true", "16-true"),
    )
    if options.data_parallel == "fsdp" and replicas > 1:
        if not (is_built_later(module) or is_assembled(module)):  # assembly has found the units
            checks.check_sharded_units(module, options.pipeline, options.layout.num_stages)
        if fitting:
            check_one_backward(module, replicas)
    if fitting:
        check_accumulation(trainer.accumulate_grad_batches)


def check_saving(
    options: StrategyOptions,
    world_size: int,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    *,
    in_background: bool,
) -> None:
    """Check that sharded directories support the plans of checkpoint callbacks in this fit.

    Raises:
        ConfigError: For links to a checkpoint not saved yet.
        CheckpointError: For metrics with states of a single replica.
    """
    check_checkpoint_links(
        trainer, on_save_error=options.checkpoint.on_save_error, in_background=in_background
    )
    if trainer.checkpoint_callbacks:
        warn_of_uploads(trainer)
    # In a checkpoint.
    hands_weights_back = options.start_method != "popen" and options.layout.model_parallel_size > 1
    if trainer.checkpoint_callbacks or hands_weights_back:
        check_persistent_states(module, options.layout.data_parallel_size(world_size))
