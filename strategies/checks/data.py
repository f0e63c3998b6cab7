"""Checks of the data's sizes against the model, the ranks and the schedule."""

from __future__ import annotations

import lightning.pytorch as pl

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.data.order.batch_size import BatchSizeSchedule
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.rules import check_model_layout, check_vocabulary
from megatron_lightning.strategies.checks.kinds import is_objective


def model_config(module: pl.LightningModule) -> TransformerConfig | None:
    """Return the configuration of the module's GPT model: the module's ``config``, known before the
    model is built, or the configuration of a single GPTModel in the module.
    """
    config = getattr(module, "config", None)
    if isinstance(config, TransformerConfig):
        return config
    models = [child for child in module.modules() if isinstance(child, GPTModel)]
    return models[0].config if len(models) == 1 else None


def check_config(
    module: pl.LightningModule,
    layout: ParallelLayout,
    world_size: int,
    data: pl.LightningDataModule | None = None,
    *,
    pipeline: PipelineOptions | None = None,
) -> None:
    """Check the sizes of a GPT model in the module against the layout and the data.

    Raises:
        ConfigError: Names the conflicting numbers.
    """
    config, length = model_config(module), getattr(data, "sequence_length", None)
    if config is not None:
        max_length = length if isinstance(length, int) else None
        # Two models in a pipeline have more layers than the configuration.
        num_models = len(module.templates()) if is_objective(module) else 1
        check_model_layout(
            config,
            layout,
            world_size,
            sequence_length=max_length,
            pipeline=pipeline,
            num_models=num_models,
        )
        num_ids = getattr(data, "vocab_size", None)
        check_vocabulary(config, num_ids if isinstance(num_ids, int) else None)


def check_batches(
    schedule: ScheduleChoice,
    micro_batch_size: int | None,
    data_parallel_size: int,
    data: pl.LightningDataModule | None,
) -> None:
    """Check the ``batch_size`` of a data module, if present, and every size in the
    ``batch_size_schedule``.

    Raises:
        ConfigError: If the ranks cannot split a batch into micro-batches of the given size, or the
            pipeline cannot run the resulting number of micro-batches.
    """
    batch_size = getattr(
        data, "batch_size", getattr(getattr(data, "hparams", None), "batch_size", None)
    )
    if isinstance(batch_size, int) and batch_size > 0 and schedule.placement.num_stages > 1:
        schedule.table(1 if micro_batch_size is None else -(-batch_size // micro_batch_size))
    sizes = getattr(data, "batch_size_schedule", None)
    if isinstance(sizes, BatchSizeSchedule):
        for count in sizes.num_microbatches(micro_batch_size or 1, data_parallel_size):
            schedule.table(count if micro_batch_size else 1)
