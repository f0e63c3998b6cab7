"""Checks of the Trainer's callbacks against the layout, and of loggers: before any process group
exists, and again at setup.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.checkpoints import uploads_checkpoints
from megatron_lightning.parallel.grid.layout import ParallelLayout


def check_checkpoint_links(trainer: pl.Trainer, *, on_save_error: str, in_background: bool) -> None:
    """Check the links between checkpoints: every link needs an existing checkpoint.

    Args:
        trainer: The Trainer with the callbacks.
        on_save_error: The strategy's option.
        in_background: Whether training continues while a checkpoint is written.

    Raises:
        ConfigError: If ModelCheckpoint would link to an object store, or to a checkpoint not saved
            yet and perhaps never.
    """
    for callback in getattr(trainer, "checkpoint_callbacks", []):
        if getattr(callback, "save_last", None) != "link":
            continue
        if in_background or on_save_error == "warn":
            how = (
                "checkpoints are written in the background"
                if in_background
                else 'on_save_error="warn"'
            )
            raise ConfigError(
                f'ModelCheckpoint has save_last="link" and {how}: it would move its link to a '
                "checkpoint that is not complete "
                "and may never be. Set save_last=True."
            )
        if is_remote(str(callback.dirpath or "")):
            raise ConfigError(
                f'ModelCheckpoint has save_last="link" and dirpath={callback.dirpath}; an object '
                "store has no links. Set "
                "save_last=True."
            )


def warn_of_uploads(trainer: pl.Trainer) -> None:
    """Warn of loggers unable to upload checkpoint directories."""
    for logger in trainer.loggers:
        if uploads_checkpoints(logger):
            rank_zero_warn(
                f"{type(logger).__name__} has log_model set and uploads only files; a checkpoint "
                "is a directory, and it will upload none. Make a file of one with "
                "`megatron-lightning checkpoint consolidate` and upload that."
            )


def check_callbacks(
    trainer: pl.Trainer,
    layout: ParallelLayout,
    data_parallel: str,
    num_replicas: int,
    *,
    overlapped: bool = False,
    keeps_quantized: bool = False,
    copied: bool = False,
) -> None:
    """Check the effects of callbacks on the optimizer and the weights.

    Args:
        trainer: The Trainer with the callbacks.
        layout: Sizes of the parallel axes.
        data_parallel: The strategy's mode.
        num_replicas: Data-parallel ranks.
        overlapped: Whether parameters are gathered beside the next forward.
        keeps_quantized: Whether weights are kept as quantized data.
        copied: Whether optimizers step copies of the parameters.

    Raises:
        ConfigError: If a callback needs full parameters instead of shards, or reads weights in the
            middle of a gather.
    """
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    # Each check names one conflict: who reads parameters that are on their way, are quantized data,
    # or are on another rank.
    sharded = data_parallel != "ddp" and num_replicas > 1
    if overlapped:
        _check_readers(
            callbacks,
            "between a step and the next forward, when overlap_param_gather=True is still "
            "gathering them. Set overlap_param_gather=False",
        )
    if keeps_quantized and sharded:
        _check_readers(
            callbacks,
            "and fp8_param_gather=True keeps those of quantized layers as quantized data of 8 "
            "bits. Set fp8_param_gather=False",
        )
    if sharded or layout.pp > 1:
        _check_finetuning(callbacks, layout, data_parallel, num_replicas, sharded=sharded)
    elif copied and (finetuning := _first(callbacks, BaseFinetuning)) is not None:
        raise ConfigError(
            f"{type(finetuning).__name__} adds parameters to the optimizer during fit, which steps "
            "fp32 main params or copies of them with half-precision weights and with "
            'data_parallel_options for the optimizer. Set precision="bf16-mixed" and default '
            "data_parallel_options."
        )
    if sharded or layout.model_parallel_size > 1:
        _check_pruning(callbacks, layout, data_parallel)
    if num_replicas > 1 or layout.model_parallel_size > 1:
        _check_finders(callbacks)
    averaging = _first(callbacks, WeightAveraging, StochasticWeightAveraging)
    if sharded and data_parallel == "fsdp" and averaging is not None:
        raise ConfigError(
            f'{type(averaging).__name__} copies full modules, and data_parallel="fsdp" keeps their '
            f'parameters in {num_replicas} parts. Set data_parallel="zero1".'
        )


def _first(callbacks: list[pl.Callback], *kinds: type[pl.Callback]) -> pl.Callback | None:
    return next((callback for callback in callbacks if isinstance(callback, kinds)), None)


def _check_finders(callbacks: list[pl.Callback]) -> None:
    finder = _first(callbacks, BatchSizeFinder)
    if finder is not None:
        raise ConfigError(
            f"{type(finder).__name__} tries batches until the memory ends, which Lightning does in "
            "a single process, and the job has several ranks. Remove it, and find the largest "
            "micro_batch_size with `megatron-lightning plan`, which knows each rank's bytes "
            "without a run."
        )


def _check_finetuning(
    callbacks: list[pl.Callback],
    layout: ParallelLayout,
    data_parallel: str,
    num_replicas: int,
    *,
    sharded: bool,
) -> None:
    finetuning = _first(callbacks, BaseFinetuning)
    if finetuning is None:
        return
    if sharded:
        raise ConfigError(
            f"{type(finetuning).__name__} adds parameters to the optimizer during fit, whose state "
            f"is sharded over the {num_replicas} data-parallel ranks with "
            f'data_parallel="{data_parallel}". Set data_parallel="ddp".'
        )
    raise ConfigError(
        f"{type(finetuning).__name__} unfreezes layers during fit, and the {layout.pp} pipeline "
        "ranks, which hold different layers, agree once which parameters they train. Set "
        "pipeline_model_parallel_size=1, or freeze layers before fit."
    )


def _check_pruning(
    callbacks: list[pl.Callback], layout: ParallelLayout, data_parallel: str
) -> None:
    pruning = _first(callbacks, ModelPruning)
    if pruning is not None:
        raise ConfigError(
            f"{type(pruning).__name__} chooses the weights to prune among those that one rank "
            "sees, and gives weights other memory; here each rank has a part (tensor "
            f"{layout.tp} x pipeline {layout.pp}, "
            f'data_parallel="{data_parallel}"). Set both sizes to 1 and data_parallel="ddp".'
        )


def _check_readers(callbacks: list[pl.Callback], why: str) -> None:
    """Check that no callback reads missing weights."""
    readers = (WeightAveraging, StochasticWeightAveraging)
    reader = next(
        (c for c in callbacks if isinstance(c, readers) or getattr(c, "reads_weights", False)), None
    )
    if reader is not None:
        raise ConfigError(
            f"{type(reader).__name__} reads the weights {why}, or remove the callback."
        )
