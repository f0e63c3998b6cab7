"""Advice on pipelines with much idle time."""

from __future__ import annotations

from megatron_lightning.pipeline.schedules import FixedTable, ScheduleChoice
from megatron_lightning.pipeline.schedules.simulate import simulate


def advice_on_full_batches(num_ranks: int) -> str:
    """Return the cost of a pipeline without micro-batches."""
    return (
        "micro_batch_size is not set: each batch runs as one micro-batch, and the pipeline of "
        f"{num_ranks} ranks is idle {(num_ranks - 1) / num_ranks:.0%} of the time. Set "
        "micro_batch_size to a fraction of the batch size."
    )


def advice_on_few_microbatches(schedule: ScheduleChoice, num_microbatches: int) -> str | None:
    """Return the cost of a batch with fewer micro-batches than pipeline ranks. None if there are
    enough micro-batches, or just one.
    """
    ranks = schedule.placement.num_ranks
    if not 1 < num_microbatches < ranks or isinstance(schedule.generator, FixedTable):
        return None
    idle = [
        f"{simulate(schedule.table(number)).bubble:.0%}"
        for number in (num_microbatches, ranks, 4 * ranks)
    ]
    return (
        f"a batch has {num_microbatches} micro-batches, fewer than the {ranks} pipeline ranks, "
        f"which are idle {idle[0]} of the time ({idle[1]} with {ranks} micro-batches, {idle[2]} "
        f"with {4 * ranks}). Lower micro_batch_size, or raise the batch size."
    )
