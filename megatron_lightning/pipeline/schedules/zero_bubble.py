"""Schedules that split the backward and fill idle time with weight gradients. No torch here.

Notation: P pipeline ranks, M micro-batches, F forward, I gradient of the input, W gradient of the
weights. The papers write B for our I, and call B + W our B.
"""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.rows import count_microbatches


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return 1F1B with split backwards and more deferred weight gradients on later stages.

    ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.1. Stage s
    defers s weight gradients, so that every stage holds at most P micro-batches' activations,
    1F1B's maximum. Each pp rank idles (P-1)(F+I-W), a third of 1F1B's (P-1)(F+I+W) if the three
    take equally long.
    """
    if num_chunks != 1:
        raise ConfigError(
            "schedule zb-h1 runs one model chunk on each pipeline rank, and there are "
            f"{num_chunks}. Set "
            'virtual_pipeline_model_parallel_size to 1, or pipeline_schedule to "zbv" (2 chunks) '
            'or "interleaved".'
        )
    placement = Placement.loop(num_ranks)
    # Rows are written for enough micro-batches to fill the pipeline. count_microbatches drops the
    # surplus.
    filling = max(num_microbatches, num_ranks - 1)

    def actions_of(stage: int) -> tuple[Action, ...]:
        forward, input_gradient, weight_gradient = _words(stage)
        behind = num_ranks - 1 - stage
        # Five phases: fill; 1F1B while weight gradients wait; steady; drain, each W right behind
        # its I; the waiting weight gradients where the bubble of 1F1B would be.
        words = [forward] * behind
        words += [forward, input_gradient] * stage
        words += [forward, input_gradient, weight_gradient] * (filling - behind - stage)
        words += [input_gradient, weight_gradient] * behind
        words += [weight_gradient] * stage
        return count_microbatches(words, num_microbatches)

    actions = tuple(actions_of(placement.stages_of(pp_rank)[0]) for pp_rank in range(num_ranks))
    return Schedule("zb-h1", placement, num_microbatches, actions)


def zbv(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Return the schedule of two chunks on each pp rank, placed up the pp ranks and down again.

    ZB-V of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 6, for equal
    F, I and W. The first and the last stage share pp rank 0, so a micro-batch's backward begins on
    the rank of the end of the forward. Each pp rank idles (P-1)F of a chunk, at M of 2P-1 or more,
    and holds at most 2P activations of a chunk, 1F1B's maximum.
    """
    if num_chunks != 2:
        raise ConfigError(
            "schedule zbv runs two model chunks on each pipeline rank, and there are "
            f"{num_chunks}. Set "
            'virtual_pipeline_model_parallel_size to 2, or pipeline_schedule to "zb-h1" (1 chunk) '
            'or "interleaved".'
        )
    placement = Placement.v(num_ranks)
    filling = max(num_microbatches, 2 * num_ranks - 1)

    def actions_of(pp_rank: int) -> tuple[Action, ...]:
        (f0, i0, w0), (f1, i1, w1) = map(_words, placement.stages_of(pp_rank))  # up, and down again
        behind = num_ranks - pp_rank
        # Fill chunk 0, then both chunks; begin the backwards of chunk 1; steady state without a
        # bubble; drain. At the end W waits for every I, since other ranks wait for I alone.
        words = [f0] * (2 * behind - 1)
        words += [f1, f0] * pp_rank
        words += [f1, i1, w1] * behind
        words += [f0, i0, w0, f1, i1, w1] * (filling - num_ranks - behind + 1)
        words += [i0, w0, f1, i1, w1] * (behind - 1)
        words += [i0, i1] * pp_rank
        words += [i0, w0] * behind
        words += [w1] * pp_rank + [w0] * pp_rank
        return count_microbatches(words, num_microbatches)

    actions = tuple(actions_of(pp_rank) for pp_rank in range(num_ranks))
    return Schedule("zbv", placement, num_microbatches, actions)


def _words(stage: int) -> tuple[tuple[int, Kind], tuple[int, Kind], tuple[int, Kind]]:
    return (stage, Kind.FORWARD), (stage, Kind.INPUT_GRADIENT), (stage, Kind.WEIGHT_GRADIENT)
