"""Checks of the strategy's settings against each other, the module and the Trainer, before any process group exists."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import LBFGS

from megatron_lightning.config import DataParallelOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid import RankGrid
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.rules import check_model_layout

SUPPORTED_PRECISION = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")


def check_options(layout: ParallelLayout, micro_batch_size: int | None, data_parallel: str, start_method: str) -> None:
    """Check what the strategy was given.

    Raises:
        ConfigError: For a value that cannot work.
    """
    for name, size in (("context_parallel_size", layout.cp), ("expert_model_parallel_size", layout.ep)):
        if size != 1:
            raise ConfigError(f"{name}={size} is not available in this version. Set it to 1.")
    if layout.etp != layout.tp:
        raise ConfigError(
            f"expert_tensor_parallel_size={layout.etp} differs from tensor_model_parallel_size={layout.tp}, and experts are "
            "not available in this version. Leave it unset."
        )
    if layout.vpp != 1:
        raise ConfigError(f"virtual_pipeline_model_parallel_size={layout.vpp} is not available in this version. Set it to 1.")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size is {micro_batch_size}; set it to 1 or more, or leave it unset for whole batches.")
    if data_parallel not in ("ddp", "zero1"):
        raise ConfigError(f'data_parallel is {data_parallel!r}, which is not available. Set it to "zero1" or "ddp".')
    if start_method not in ("popen", "spawn", "fork"):
        raise ConfigError(f'start_method is {start_method!r}. Set it to "popen", "spawn" or "fork".')


def check_data_parallel(layout: ParallelLayout, data_parallel: str, options: DataParallelOptions, world_size: int) -> None:
    """Check how gradients and optimizer state are to be shared.

    Raises:
        ConfigError: For options that the mode does not have, or that do not divide the ranks.
    """
    instances = options.num_distributed_optimizer_instances
    if instances > 1 and data_parallel != "zero1":
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} divides the shards of the optimizer among groups of ranks, and "
            f'data_parallel="{data_parallel}" has none. Set data_parallel="zero1", or num_distributed_optimizer_instances=1.'
        )
    grid = RankGrid(layout, world_size)
    sizes = {"data x context": grid.size("dp-cp")}
    if layout.ep > 1:
        sizes["expert data"] = grid.size("dp", "expert")
    for name, size in sizes.items():
        if size % instances:
            raise ConfigError(
                f"num_distributed_optimizer_instances={instances} does not divide the {size} {name} parallel ranks into equal "
                f"groups. Set it to a divisor of {size}."
            )


def check_precision(plugin: Precision | None, world_size: int) -> None:
    """Check the Trainer's precision.

    Raises:
        ConfigError: If several ranks would disagree under it.
    """
    precision = getattr(plugin, "precision", "32-true")
    if world_size > 1 and precision not in SUPPORTED_PRECISION:
        raise ConfigError(
            f"precision={precision!r} is not supported on {world_size} ranks: its small gradients would vanish. "
            f"Set it to one of {', '.join(SUPPORTED_PRECISION)}."
        )


def check_checkpoint_io(plugin: CheckpointIO | None, world_size: int) -> None:
    """Check the user's checkpoint plugin.

    Raises:
        ConfigError: If there are several ranks, each of which has a part of the checkpoint.
    """
    if plugin is not None and world_size > 1:
        raise ConfigError(
            f"plugins has a {type(plugin).__name__}, which saves one dict from one process, and here {world_size} ranks hold a "
            "part each. Remove it (checkpoints are sharded directories; `megatron-lightning checkpoint consolidate` makes one "
            "file of them), or use one device."
        )


def check_storage(path: str, storage_options: object) -> None:
    """Check where a checkpoint is to be saved.

    Raises:
        ConfigError: If it is not a local path, or there are options that nobody reads.
    """
    if storage_options is not None:
        raise ConfigError(
            f"storage_options={storage_options!r} has no meaning for a checkpoint directory. Leave it out, or, on one device, "
            "pass a CheckpointIO plugin that understands it: Trainer(plugins=[...])."
        )
    if "://" in path:
        raise ConfigError(
            f"{path} is not a path of this machine's file system, and checkpoint directories are written there alone. Set "
            "dirpath or default_root_dir to a directory that all ranks see, or, on one device, pass a CheckpointIO plugin."
        )


def check_callbacks(trainer: pl.Trainer, *, sharded: bool) -> None:
    """Check what callbacks do to the optimizer.

    Raises:
        ConfigError: If one looks for whole parameters in an optimizer that has parts of them.
    """
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    finetuning = next((callback for callback in callbacks if isinstance(callback, BaseFinetuning)), None)
    if sharded and finetuning is not None:
        raise ConfigError(
            f"{type(finetuning).__name__} adds parameters to the optimizer during fit, whose state is sharded over the "
            'data-parallel ranks with data_parallel="zero1". Set data_parallel="ddp".'
        )


def check_config(
    module: pl.LightningModule, layout: ParallelLayout, world_size: int, sequence_length: int | None = None
) -> None:
    """Check the model's sizes against the layout, where the module says them in ``config``.

    Raises:
        ConfigError: Naming the numbers that do not fit.
    """
    config = getattr(module, "config", None)
    if isinstance(config, TransformerConfig):
        check_model_layout(config, layout, world_size, sequence_length=sequence_length)


def check_optimizers(
    optimizers: Sequence[object], layout: ParallelLayout, micro_batch_size: int | None, world_size: int
) -> None:
    """Check what ``configure_optimizers`` returned.

    Raises:
        ConfigError: For an optimizer that evaluates the step several times and decides by what this rank sees of it.
    """
    searching = [optimizer for optimizer in optimizers if isinstance(optimizer, LBFGS)]
    if searching and (world_size > 1 or micro_batch_size is not None):
        raise ConfigError(
            f"configure_optimizers returned {type(searching[0]).__name__}, which runs the step several times and decides by "
            f"this rank's part of the run (pipeline {layout.pp}, micro_batch_size {micro_batch_size}, {world_size} ranks)."
            " Use a first-order optimizer such as AdamW, or one device and micro_batch_size=None."
        )


def check_module(
    module: pl.LightningModule, layout: ParallelLayout, micro_batch_size: int | None, world_size: int, *, fitting: bool
) -> None:
    """Check what the LightningModule does against the layout.

    Raises:
        ConfigError: For steps that a pipeline or several data-parallel ranks cannot run.
    """
    schedules = layout.num_stages > 1 or micro_batch_size is not None
    if fitting and not module.automatic_optimization and (schedules or world_size > 1):
        raise ConfigError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and here the strategy runs the "
            f"backward passes (pipeline {layout.pp}, micro_batch_size {micro_batch_size}, {world_size} ranks). Set "
            "automatic_optimization=True, or use one device, pipeline_model_parallel_size=1 and micro_batch_size=None."
        )
    if fitting and schedules and is_overridden("backward", module):
        raise ConfigError(
            f"{type(module).__name__} overrides backward(), which a schedule of micro-batches does not call. Remove the "
            "override, or set pipeline_model_parallel_size=1 and micro_batch_size=None."
        )
    if layout.pp > 1 and micro_batch_size is None:
        rank_zero_warn(
            f"micro_batch_size is not set: each batch runs as one micro-batch, and the pipeline of {layout.pp} ranks is idle "
            f"{(layout.pp - 1) / layout.pp:.0%} of the time. Set micro_batch_size to a fraction of the batch size."
        )
