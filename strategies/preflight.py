"""Checks of the strategy's settings against each other, model sizes, data and the Trainer, before any group exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import LBFGS, Optimizer

from megatron_lightning.config import DataParallel, DataParallelOptions, NonFinite, TransformerConfig
from megatron_lightning.data.batch_size import BatchSizeSchedule
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.buckets import main_dtype
from megatron_lightning.parallel.grid import RankGrid
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import FixedTable, ScheduleChoice
from megatron_lightning.pipeline.simulate import simulate
from megatron_lightning.rules import check_model_layout, check_vocabulary

SUPPORTED_PRECISION = ("32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true", "64-true")


def check_options(
    layout: ParallelLayout, micro_batch_size: int | None, data_parallel: str, start_method: str, non_finite: str = "ignore"
) -> None:
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
    if micro_batch_size is not None and (type(micro_batch_size) is not int or micro_batch_size < 1):
        raise ConfigError(
            f"micro_batch_size is {micro_batch_size!r}; it counts samples. Set it to a whole number of 1 or more, or leave it "
            "unset for whole batches."
        )
    if data_parallel not in get_args(DataParallel):
        raise ConfigError(f'data_parallel is {data_parallel!r}, which is unknown. Set it to "ddp", "zero1" or "fsdp".')
    check_non_finite(non_finite)
    if start_method not in ("popen", "spawn", "fork"):
        raise ConfigError(f'start_method is {start_method!r}. Set it to "popen", "spawn" or "fork".')


def check_non_finite(policy: str) -> None:
    """Check what is to be done about infinite and NaN values.

    Raises:
        ConfigError: If it is unknown.
    """
    if policy not in get_args(NonFinite):
        raise ConfigError(f'non_finite is {policy!r}. Set it to "ignore", "raise" or "skip".')


def check_data_parallel(layout: ParallelLayout, data_parallel: str, options: DataParallelOptions, world_size: int) -> None:
    """Check how gradients and optimizer state are to be shared.

    Raises:
        ConfigError: For options that the mode does not have, or that do not divide the ranks.
    """
    instances = options.num_distributed_optimizer_instances
    if options.overlap_param_gather and data_parallel != "zero1":
        raise ConfigError(
            f"overlap_param_gather=True gathers the shards of the zero1 optimizer, and data_parallel is {data_parallel!r}. "
            'Set data_parallel="zero1", or overlap_param_gather=False.'
        )
    if instances != 1 and data_parallel == "ddp":
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} divides the ranks that share shards, and data_parallel is "
            '\'ddp\', which has none. Set data_parallel="zero1" or "fsdp", or num_distributed_optimizer_instances=1.'
        )
    if data_parallel != "fsdp" and (options.reshard_after_forward is not None or options.reduce_every_microbatch):
        raise ConfigError(
            f"reshard_after_forward={options.reshard_after_forward} and "
            f"reduce_every_microbatch={options.reduce_every_microbatch} "
            f'say how fsdp shards parameters and gradients, which data_parallel="{data_parallel}" keeps whole. Set '
            'data_parallel="fsdp", or leave both unset.'
        )
    grid = RankGrid(layout, world_size)
    sizes = {"data x context": grid.size("dp-cp")}
    if layout.ep > 1:
        sizes["expert data"] = grid.size("dp", "expert")
    if data_parallel == "fsdp" and 1 < instances == sizes["data x context"]:
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} divides the {instances} data x context parallel ranks into "
            'groups of one, which would shard nothing. Set data_parallel="ddp", or fewer instances.'
        )
    for name, size in sizes.items():
        if size % instances:
            raise ConfigError(
                f"num_distributed_optimizer_instances={instances} does not divide the {size} {name} parallel ranks into equal "
                f"groups. Set it to a divisor of {size}."
            )


def check_precision(plugin: Precision | None, world_size: int) -> None:
    """Check the Trainer's precision.

    Raises:
        ConfigError: If it is not known to be right for the parts of a model on several ranks.
    """
    precision = getattr(plugin, "precision", "32-true")
    if world_size > 1 and precision not in SUPPORTED_PRECISION:
        raise ConfigError(
            f"precision={precision!r} of {type(plugin).__name__} is not supported on {world_size} ranks: it is made for whole "
            f"models on one device, and here each rank has a part. Set it to one of {', '.join(SUPPORTED_PRECISION)}."
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


def check_layer_sync(layer_sync: LayerSync | None, device: torch.device, data_parallel_size: int) -> None:
    """Check whether BatchNorm can see the samples of all replicas.

    Raises:
        ConfigError: On devices that torch's layer is not for.
    """
    if isinstance(layer_sync, TorchSyncBatchNorm) and data_parallel_size > 1 and device.type == "cpu":
        raise ConfigError(
            "sync_batchnorm=True replaces BatchNorm by torch's SyncBatchNorm, which has no CPU kernels, and "
            f"{data_parallel_size} data-parallel ranks train on CPUs. Set sync_batchnorm=False: every rank then normalises by "
            "its own samples, and keeps the first rank's running statistics."
        )


def check_storage(storage_options: object) -> None:
    """Check how a checkpoint is to be saved.

    Raises:
        ConfigError: If there are options that nobody reads.
    """
    if storage_options is not None:
        raise ConfigError(
            f"storage_options={storage_options!r} has no meaning for a checkpoint directory. Leave it out, or, on one device, "
            "pass a CheckpointIO plugin that understands it: Trainer(plugins=[...])."
        )


def check_config(
    module: pl.LightningModule,
    layout: ParallelLayout,
    world_size: int,
    data: pl.LightningDataModule | None = None,
    *,
    explicit_stages: bool = False,
) -> None:
    """Check the model's sizes against the layout and the data, where the module says them in ``config``.

    Raises:
        ConfigError: Naming the numbers that do not fit.
    """
    config, length = getattr(module, "config", None), getattr(data, "sequence_length", None)
    if isinstance(config, TransformerConfig):
        known = length if isinstance(length, int) else None
        check_model_layout(config, layout, world_size, sequence_length=known, explicit_stages=explicit_stages)
        num_ids = getattr(data, "vocab_size", None)
        check_vocabulary(config, num_ids if isinstance(num_ids, int) else None)


def check_batches(
    schedule: ScheduleChoice, micro_batch_size: int | None, data_parallel_size: int, data: pl.LightningDataModule | None
) -> None:
    """Check the size of a data module's batches, where it says it, and every size that its ``batch_size_schedule`` comes to.

    Raises:
        ConfigError: If the ranks cannot share one in whole micro-batches, or the pipeline cannot run as many.
    """
    batch_size = getattr(data, "batch_size", getattr(getattr(data, "hparams", None), "batch_size", None))
    if isinstance(batch_size, int) and batch_size > 0 and schedule.placement.num_stages > 1:
        schedule.table(1 if micro_batch_size is None else -(-batch_size // micro_batch_size))
    sizes = getattr(data, "batch_size_schedule", None)
    if isinstance(sizes, BatchSizeSchedule):
        for count in sizes.num_microbatches(micro_batch_size or 1, data_parallel_size):
            schedule.table(count if micro_batch_size else 1)


def check_accumulation(num_batches: int) -> None:
    """Check how many batches make an optimizer step.

    Raises:
        ConfigError: If none does, by which Lightning's loop would divide.
    """
    if num_batches < 1:
        raise ConfigError(
            f"accumulate_grad_batches is {num_batches}; it counts the batches of an optimizer step. Set it to 1 or more."
        )


@contextmanager
def explained_empty_optimizers(layout: ParallelLayout, pp_rank: int) -> Iterator[None]:
    """Say what torch's complaint about an optimizer without parameters means in a pipeline.

    Raises:
        ConfigError: If ``configure_optimizers`` finds no parameters on this pipeline rank.
    """
    try:
        yield
    except ValueError as error:
        if layout.pp == 1 or "empty parameter list" not in str(error):
            raise
        raise ConfigError(
            f"configure_optimizers found no parameters for an optimizer on pipeline rank {pp_rank} of {layout.pp}: the units "
            "there have none, or none that it selects. Lower pipeline_model_parallel_size, put units with trained "
            "parameters on every rank, or give the optimizer a list of groups, which may be empty: "
            'AdamW([{"params": parameters}]).'
        ) from error


def check_optimizers(
    optimizers: Sequence[object],
    layout: ParallelLayout,
    micro_batch_size: int | None,
    world_size: int,
    options: DataParallelOptions,
    *,
    sharded: bool = False,
) -> None:
    """Check what ``configure_optimizers`` returned.

    Raises:
        ConfigError: For an optimizer that evaluates the step several times, where it decides by what this rank sees of it, or
            steps copies of the weights, so that it would see the loss of others than it tries; for an object that is no
            torch optimizer, where the data-parallel ranks step shards; for one that shards its own state.
    """
    foreign = next((optimizer for optimizer in optimizers if not isinstance(optimizer, Optimizer)), None)
    if sharded and foreign is not None:
        raise ConfigError(
            f"configure_optimizers returned a {type(foreign).__name__}, which is no torch.optim.Optimizer, and data_parallel "
            'is "zero1" or "fsdp", which put shards into the param_groups of one. Derive it from torch.optim.Optimizer, or set '
            'data_parallel="ddp".'
        )
    apart = next((optimizer for optimizer in optimizers if hasattr(optimizer, "consolidate_state_dict")), None)
    if apart is not None:  # torch's name for it, and that of optimizers after its model
        raise ConfigError(
            f"configure_optimizers returned a {type(apart).__name__}, which shares its state out among the ranks, where "
            "checkpoints do not find it. Return the optimizer that it is made of: the strategy shares out its state with "
            'data_parallel="zero1".'
        )
    searching = [optimizer for optimizer in optimizers if isinstance(optimizer, LBFGS)]
    if searching and (world_size > 1 or micro_batch_size is not None):
        raise ConfigError(
            f"configure_optimizers returned {type(searching[0]).__name__}, which runs the step several times and decides by "
            f"this rank's part of the run (pipeline {layout.pp}, micro_batch_size {micro_batch_size}, {world_size} ranks)."
            " Use a first-order optimizer such as AdamW, or one device and micro_batch_size=None."
        )
    for optimizer in searching:
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        copies = [f"fp32 masters of {dtype} weights" for dtype in dtypes if main_dtype(dtype) != dtype]
        copies += ["copies in host memory (optimizer_cpu_offload=True)"] if options.optimizer_cpu_offload else []
        if copies:
            raise ConfigError(
                f"configure_optimizers returned {type(optimizer).__name__}, which tries weights within a step, and would step "
                f"{' and '.join(copies)}, which reach the module after the step. Use a first-order optimizer such as AdamW, or "
                'precision="32-true" or "bf16-mixed" and optimizer_cpu_offload=False.'
            )


def warn_of_idle_pipeline(layout: ParallelLayout, micro_batch_size: int | None) -> None:
    """Say what a pipeline costs whose batches are not cut."""
    if layout.pp > 1 and micro_batch_size is None:
        rank_zero_warn(
            f"micro_batch_size is not set: each batch runs as one micro-batch, and the pipeline of {layout.pp} ranks is idle "
            f"{(layout.pp - 1) / layout.pp:.0%} of the time. Set micro_batch_size to a fraction of the batch size."
        )


def warn_of_few_microbatches(schedule: ScheduleChoice, num_microbatches: int) -> None:
    """Say what a training step costs that has fewer micro-batches than the pipeline has ranks, and which numbers cost less."""
    ranks = schedule.placement.num_coordinates
    written = isinstance(schedule.generator, FixedTable)
    if 1 < num_microbatches < ranks and not written:  # one: see warn_of_idle_pipeline
        idle = [f"{simulate(schedule.table(number)).bubble:.0%}" for number in (num_microbatches, ranks, 4 * ranks)]
        rank_zero_warn(
            f"a batch has {num_microbatches} micro-batches, fewer than the {ranks} pipeline ranks, which are idle {idle[0]} of "
            f"the time ({idle[1]} with {ranks} micro-batches, {idle[2]} with {4 * ranks}). Lower micro_batch_size, or raise "
            "the batch size."
        )


def check_process_groups(backend: str | None, timeout_s: float) -> None:
    """Check that the process groups will serve tensors on the CPU, where ranks compare weights and plans, and wait for others.

    Raises:
        ConfigError: For a backend of one kind of accelerator alone, or a time that is none.
    """
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is {timeout_s!r}; ranks wait that many seconds for each other. Set it above 0.")
    if backend is not None and "cpu:" not in backend and backend not in ("gloo", "mpi", "ucc"):
        raise ConfigError(
            f"process_group_backend={backend!r} has no backend for CPU tensors, on which the ranks compare their weights and "
            f'agree on checkpoints. Leave it unset, or set it to "cpu:gloo,cuda:{backend.rpartition(":")[2]}".'
        )
