"""Bytes on every rank: weights, gradients, optimizer and activations. No torch here.

Ranks with the same position in the pipeline hold the same, so there is one row for each pipeline
rank. Of N parameters on n data-parallel ranks, with weights of w bytes and Adam's two moments in
fp32 (``optim/buckets.py``, ``optim/fully_sharded.py``; padding of buckets is left out):

             weights                   gradients               optimizer (m: main params, 4 or 0)
    ddp      w N                       4 N                     (8 + m) N
    zero1    w N                       4 N                     (8 + m) N / n
    fsdp     (m or w) N / n            4 N, or with reduce_    8 N / n
             + gathered units          every_microbatch of
                                       one unit, + 4 N / n

n counts data x context parallel ranks, and for experts those that hold the same ones. fsdp's shards
are the main params, and it leaves shared embeddings to zero1. Activations are those of
``activations.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from megatron_lightning.config import (
    DataParallel,
    DataParallelOptions,
    PipelineOptions,
    RecomputeOptions,
    TransformerConfig,
)
from megatron_lightning.config.checks import check_choice, check_kind, is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid import RankGrid
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.planning.activations import (
    in_flight,
    num_received,
    rank_peak,
    stage_profile,
)
from megatron_lightning.planning.layers import DeviceKind, Sizes
from megatron_lightning.planning.parameters import (
    EMBEDDING,
    OUTPUT,
    ParameterCount,
    count_rank,
    count_unit,
    split_stages,
)
from megatron_lightning.planning.precision import Precision, precision_of
from megatron_lightning.rules import check_data_parallel, check_model_layout

_MAIN = 4  # bytes of fp32
_MOMENTS = 2  # of Adam


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the ranks at one position of the pipeline."""

    pp_rank: int
    """Position on the pipeline axis."""
    parameters: int
    """Parameters of a rank, before data-parallel sharding."""
    weights_bytes: int
    """Weights that forward and backward use."""
    gradients_bytes: int
    """Gradients, summed over micro-batches."""
    optimizer_bytes: int
    """Main params and moments on the device."""
    activations_bytes: int
    """Activations and temporaries at the peak of a step."""
    in_flight: int
    """Most (stage, micro-batch) activations held at once."""

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


@dataclass(frozen=True)
class Memory:
    """Memory of a layout."""

    ranks: tuple[RankMemory, ...]
    """One row for each pipeline rank."""

    @property
    def fullest(self) -> RankMemory:
        """The row with the most bytes."""
        return max(self.ranks, key=lambda row: row.total_bytes)

    @property
    def weights_bytes(self) -> int:
        """Weights on the fullest rank."""
        return self.fullest.weights_bytes

    @property
    def gradients_bytes(self) -> int:
        """Gradients on the fullest rank."""
        return self.fullest.gradients_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Main params and moments on the fullest rank."""
        return self.fullest.optimizer_bytes

    @property
    def activations_bytes(self) -> int:
        """Activations on the fullest rank."""
        return self.fullest.activations_bytes

    @property
    def total_bytes(self) -> int:
        """All bytes on the fullest rank."""
        return self.fullest.total_bytes


def memory(
    config: TransformerConfig,
    layout: ParallelLayout,
    *,
    world_size: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int = 1,
    num_microbatches: int = 1,
    data_parallel: DataParallel = "zero1",
    data_parallel_options: DataParallelOptions | None = None,
    recompute: RecomputeOptions | None = None,
    pipeline_schedule: str | Sequence[str] = "auto",
    pipeline_options: PipelineOptions | None = None,
    precision: str | int | None = "bf16-true",
    device: DeviceKind = "cuda",
) -> Memory:
    """Return the bytes on the ranks of every position of the pipeline, with Adam.

    What an allocator loses, process groups and libraries hold, and a step of the optimizer
    allocates for a moment is not counted.

    Args:
        config: The model.
        layout: Sizes of the parallel axes.
        world_size: Number of ranks; None: the fewest that the layout takes.
        sequence_length: Tokens of a sample; None: the longest that the model takes.
        micro_batch_size: Samples of a micro-batch on one data-parallel rank.
        num_microbatches: Micro-batches of a pipeline run.
        data_parallel: "ddp", "zero1" or "fsdp".
        data_parallel_options: Where optimizer state is, and what fsdp keeps; None: the defaults.
        recompute: Activations that backward computes again or reads from the host; None: none.
        pipeline_schedule: As for the strategy.
        pipeline_options: How the model is partitioned; None: layers are spread evenly.
        precision: The Trainer's.
        device: "cuda" or "cpu", whose kernels keep more.

    Raises:
        ConfigError: If the options do not fit together.
    """
    options, data = pipeline_options or PipelineOptions(), data_parallel_options
    data, recompute = data or DataParallelOptions(), recompute or RecomputeOptions()
    for name, value, kind in (
        ("config", config, TransformerConfig),
        ("layout", layout, ParallelLayout),
        ("data_parallel_options", data, DataParallelOptions),
        ("recompute", recompute, RecomputeOptions),
        ("pipeline_options", options, PipelineOptions),
    ):
        check_kind(name, value, kind)
    check_choice("data_parallel", data_parallel, get_args(DataParallel))
    check_choice("device", device, get_args(DeviceKind))
    length = config.max_sequence_length if sequence_length is None else sequence_length
    counts = {"micro_batch_size": micro_batch_size, "num_microbatches": num_microbatches}
    for name, count in (counts | {"sequence_length": length}).items():
        if not is_count(count):
            raise ConfigError(f"{name} is {count!r}; it must be a positive integer.")
    world_size = layout.smallest_world_size if world_size is None else world_size
    grid = RankGrid(layout, world_size)
    check_data_parallel(grid, data_parallel, data)
    check_model_layout(
        config, layout, world_size, sequence_length=length,
        explicit_stages=options.pipeline_model_parallel_layout is not None,
    )  # fmt: skip
    choice = resolve(
        pipeline_schedule,
        num_ranks=layout.pp,
        num_chunks=layout.vpp,
        microbatch_group_size=options.microbatch_group_size_per_vp_stage,
    )
    schedule = choice.table(num_microbatches)
    stages = split_stages(config, choice.placement, options)
    sizes = Sizes(
        config=config,
        layout=layout,
        precision=precision_of(precision),
        device=device,
        sequence_length=length,
        micro_batch_size=micro_batch_size,
        split_backward=choice.splits_backward,
    )
    profiles = [stage_profile(sizes, units, recompute) for units in stages]
    rows = []
    for pp_rank in range(layout.pp):
        numbers = choice.placement.stages_of(pp_rank)
        own = [stages[stage] for stage in numbers]
        # What its stages receive, and the gradients of what the next ones do.
        received = [stages[s] for n in numbers for s in (n, n + 1) if s < len(stages)]
        message = sizes.stream_bytes * max(num_received(config, units) for units in received)
        state = _State(
            config, grid, own, precision=sizes.precision, mode=data_parallel, options=data,
            num_microbatches=num_microbatches,
        )  # fmt: skip
        rows.append(
            RankMemory(
                pp_rank=pp_rank,
                parameters=state.parameters.total,
                weights_bytes=state.weights_bytes,
                gradients_bytes=state.gradients_bytes,
                optimizer_bytes=state.optimizer_bytes,
                activations_bytes=round(rank_peak(schedule, pp_rank, profiles, message)),
                in_flight=in_flight(schedule, pp_rank),
            )
        )
    return Memory(tuple(rows))


class _State:
    """Weights, gradients and optimizer of a rank with the stages ``own``."""

    def __init__(
        self,
        config: TransformerConfig,
        grid: RankGrid,
        own: Sequence[Sequence[str]],
        *,
        precision: Precision,
        mode: DataParallel,
        options: DataParallelOptions,
        num_microbatches: int,
    ) -> None:
        layout, units = grid.layout, [unit for stage in own for unit in stage]
        instances = options.num_distributed_optimizer_instances
        self.parameters = count_rank(config, layout, own)
        shards = max(1, grid.size("dp-cp") // instances), max(1, grid.size("edp") // instances)
        self._precision = precision
        self._options = options
        tied = {EMBEDDING, OUTPUT} if config.share_embeddings_and_output_weights else set[str]()
        tied |= {EMBEDDING} if config.num_predicting_layers else set()
        # What fsdp shards, by unit: all but shared embeddings.
        counted = [count_unit(config, layout, unit) for unit in units if unit not in tied]
        managed = [
            ParameterCount(unit.dense if shards[0] > 1 else 0, unit.experts if shards[1] > 1 else 0)
            for unit in counted
            if mode == "fsdp"
        ]
        of_units = sum(managed, ParameterCount(0))
        sharded = of_units.total
        left = ParameterCount(
            self.parameters.dense - of_units.dense, self.parameters.experts - of_units.experts
        )
        per_optimizer = _MOMENTS * (2 if options.moments_dtype == "bf16" else _MAIN)
        main = precision.main_bytes
        over = shards if mode != "ddp" else (1, 1)
        stepped = left.dense / over[0] + left.experts / over[1]
        own_shard = of_units.dense / shards[0] + of_units.experts / shards[1]
        self.optimizer_bytes = round((per_optimizer + main) * stepped + per_optimizer * own_shard)
        if options.optimizer_cpu_offload:
            self.optimizer_bytes = 0
        reshards = options.reshard_after_forward
        if reshards is None:
            reshards = num_microbatches == 1
        largest = max((unit.total for unit in managed), default=0)
        # The next unit, without its experts, arrives beside this one.
        beside = max((unit.dense for unit in managed), default=0)
        gathered = largest + beside if reshards else sharded
        self.weights_bytes = round(
            precision.weight_bytes * left.total
            + (main or precision.weight_bytes) * own_shard
            + precision.weight_bytes * min(gathered, sharded)
        )
        full = largest + own_shard if options.reduce_every_microbatch else sharded
        self.gradients_bytes = round(_MAIN * (left.total + full))
