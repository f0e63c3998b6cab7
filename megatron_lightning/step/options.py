"""All settings of :class:`MegatronStrategy` by the user, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from megatron_lightning.assembly.plans import PlanChoice, check_plan_choice
from megatron_lightning.config import (
    CheckpointOptions,
    CompileOptions,
    ContextOptions,
    DataParallel,
    DataParallelOptions,
    GuardOptions,
    NonFinite,
    PipelineOptions,
    RecomputeOptions,
    StartMethod,
    StrategySettings,
)
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import ScheduleChoice, resolve
from megatron_lightning.rules import check_chunks, check_levels


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The settings of :class:`MegatronStrategy`, resolved: sizes as a layout, groups with their
    defaults, the schedule chosen.
    """

    layout: ParallelLayout
    """Sizes of the parallel axes."""
    schedule: ScheduleChoice
    """Order of work in the pipeline."""
    micro_batch_size: int | None
    """Samples of a micro-batch on one data-parallel rank. None: the whole batch is one
    micro-batch."""
    pipeline: PipelineOptions
    """Partition of the model into stages, and order of micro-batches."""
    sequence: ContextOptions
    """Attention over sequences split by context-parallel ranks."""
    data_parallel: DataParallel
    """Sharding of gradients, optimizer state and parameters over the data-parallel ranks."""
    data: DataParallelOptions
    """Buckets, communication and optimizer state of the data-parallel ranks."""
    recompute: RecomputeOptions
    """Activations to recompute in the backward pass."""
    compile: CompileOptions | None
    """Compilation of the repeated blocks of the model. None: no compilation."""
    fused_loss: bool
    """Whether losses of untouched models are computed in chunks."""
    non_finite: NonFinite
    """Response to infinite or NaN losses and gradients."""
    guards: GuardOptions
    """Response to mistakes found in the user's code."""
    checkpoint: CheckpointOptions
    """How checkpoints are written."""
    sharding_plan: PlanChoice
    """Tensor-parallel table of a model without a ``sharding_plan()`` of its own, or "auto"."""
    start_method: StartMethod
    """How local ranks are started when no torchrun or Slurm did."""
    timeout: timedelta
    """Time of waiting for another rank before a collective fails."""

    @classmethod
    def of(cls, settings: StrategySettings) -> StrategyOptions:
        """Return the options in settings.

        Raises:
            ConfigError: If the values cannot work together.
        """
        layout = ParallelLayout.of(settings)
        pipeline = settings.pipeline_options or PipelineOptions()
        sequence = settings.context_options or ContextOptions()
        check_plan_choice(settings.sharding_plan)
        check_levels(sequence, layout.cp)
        check_chunks(sequence, layout.cp, compiles=settings.compile is not None)
        return cls(
            layout=layout,
            schedule=resolve(
                settings.pipeline_schedule,
                num_ranks=layout.pp,
                num_chunks=layout.vpp,
                microbatch_group_size=pipeline.microbatch_group_size_per_vp_stage,
            ),
            micro_batch_size=settings.micro_batch_size,
            pipeline=pipeline,
            sequence=sequence,
            data_parallel=settings.data_parallel,
            data=settings.data_parallel_options or DataParallelOptions(),
            recompute=settings.recompute or RecomputeOptions(),
            compile=None
            if settings.compile is None
            else settings.compile_options or CompileOptions(),
            fused_loss=settings.fused_loss,
            non_finite=settings.non_finite,
            guards=GuardOptions.of(settings.guards),
            checkpoint=settings.checkpoint_options or CheckpointOptions(),
            sharding_plan=cast("PlanChoice", settings.sharding_plan),
            start_method=settings.start_method,
            timeout=timedelta(seconds=settings.timeout_s),
        )

    @property
    def is_native(self) -> bool:
        """Whether Lightning's own steps do the work: a single stage, the full batch and sequence.
        The same for every batch and rank.
        """
        layout = self.layout
        return layout.num_stages == layout.cp == 1 and self.micro_batch_size is None
