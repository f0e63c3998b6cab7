"""Bytes on every rank: weights, gradients, optimizer and activations. No torch here.

Ranks at the same position in the pipeline hold the same, so each pipeline rank has one row.
``states.py`` counts weights, gradients and optimizer, ``activations.py`` the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from megatron_lightning.config import (
    CompileScope,
    DataParallel,
    DataParallelOptions,
    PipelineOptions,
    RecomputeOptions,
    StrategySettings,
    TransformerConfig,
)
from megatron_lightning.config.value_checks import check_choice, check_kind, is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import make_schedule
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.planning.ledger.activation_memory import (
    num_received,
    rank_peak,
    stage_profile,
)
from megatron_lightning.planning.ledger.adapter_memory import AdaptedState, AdapterSizes
from megatron_lightning.planning.ledger.layer_tapes import DeviceKind, Sizes
from megatron_lightning.planning.ledger.optimizer_memory import State, state_of_units
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.quantized_weights import (
    cached_weight_bytes,
    count_matrices,
)
from megatron_lightning.planning.ledger.rank_parameters import split_stages
from megatron_lightning.planning.ledger.tower_memory import TowerSizes
from megatron_lightning.planning.search.unit_cache import LikeUnits
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.rules import check_data_parallel, check_model_layout


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the ranks at one position of the pipeline."""

    pp_rank: int
    """Position on the pipeline axis."""
    parameters: int
    """Parameters of a rank, before data-parallel sharding."""
    weights_bytes: int
    """Weights used by forward and backward."""
    gradients_bytes: int
    """Gradients, summed over micro-batches."""
    optimizer_bytes: int
    """Main params and moments on the device."""
    activations_bytes: int
    """Activations and temporaries at the peak of a step."""
    in_flight: int
    """Most (stage, micro-batch) activations held at once."""

    @classmethod
    def of_state(
        cls, pp_rank: int, state: State | AdaptedState, activations_bytes: float, in_flight: int
    ) -> RankMemory:
        """Return the bytes of a rank's state, and of the rank's activations."""
        return cls(
            pp_rank=pp_rank,
            parameters=state.parameters.total,
            weights_bytes=state.weights_bytes,
            gradients_bytes=state.gradients_bytes,
            optimizer_bytes=state.optimizer_bytes,
            activations_bytes=round(activations_bytes),
            in_flight=in_flight,
        )

    @property
    def total_bytes(self) -> int:
        """Sum of all bytes."""
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
    """A row for each pipeline rank."""

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


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of a training apart from the sizes of a micro-batch."""

    grid: RankGrid
    data_parallel: DataParallel
    data: DataParallelOptions
    recompute: RecomputeOptions
    adapters: AdapterSizes | None = None
    """Trained adapters of a frozen model. None: all parameters are trained."""
    rounds_weights: bool = False
    """Whether the forward rounds the weights of blocks."""
    tower: TowerSizes | None = None
    """Tower of images on the first stage. None: the model reads text alone."""


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
    pipeline_schedule: str | Sequence[str] | Schedule = "auto",
    pipeline_options: PipelineOptions | None = None,
    precision: str | int | None = "bf16-true",
    fp8_recipe: FP8Recipe | None = None,
    adapters: AdapterSizes | None = None,
    compile: CompileScope | None = None,
    device: DeviceKind = "cuda",
) -> Memory:
    """Return the bytes on the ranks of every position of the pipeline, with Adam.

    Allocator losses, memory of process groups and libraries, and temporaries of an optimizer step
    do not count.

    Args:
        config: The model.
        layout: Sizes of the parallel axes.
        world_size: Number of ranks. None: the smallest number for the layout.
        sequence_length: Tokens of a sample. None: the model's maximum.
        micro_batch_size: Samples of a micro-batch on a data-parallel rank.
        num_microbatches: Micro-batches of a pipeline run.
        data_parallel: "ddp", "zero1" or "fsdp".
        data_parallel_options: Place of the optimizer state, and weights kept by fsdp. None: the
            defaults.
        recompute: Recomputed or offloaded activations. None: no recomputation.
        pipeline_schedule: As for the strategy, or a proven table of ``num_microbatches``.
        pipeline_options: Partition of the model. None: layers are spread evenly.
        precision: The Trainer's.
        fp8_recipe: Recipe of ``MegatronFP8Precision`` with precision "bf16-mixed": weights and
            inputs of linear layers stored as quantized data.
        adapters: Trained adapters of a frozen model. None: all parameters are trained.
        compile: As for the strategy. "block": inductor compiles the layers.
        device: "cuda" or "cpu". CPU kernels keep more.

    Raises:
        ConfigError: If the options do not fit together.
    """
    options, data = pipeline_options or PipelineOptions(), data_parallel_options
    data, recompute = data or DataParallelOptions(), recompute or RecomputeOptions()
    _check_kinds(config, layout, data, recompute, options)
    length = config.max_sequence_length if sequence_length is None else sequence_length
    _check_sizes(micro_batch_size, num_microbatches, length)
    StrategySettings(data_parallel=data_parallel, compile=compile)  # checks both
    if fp8_recipe is not None:
        check_kind("fp8_recipe", fp8_recipe, FP8Recipe)
    check_choice("device", device, get_args(DeviceKind))
    world_size = layout.smallest_world_size if world_size is None else world_size
    grid = RankGrid(layout, world_size)
    check_data_parallel(grid, data_parallel, data)
    check_model_layout(config, layout, world_size, sequence_length=length, pipeline=options)
    schedule = _table(pipeline_schedule, layout, num_microbatches, options)
    # Checks first, in the order in which a strategy would find the mistakes.
    sizes = Sizes(
        config=config,
        layout=layout,
        precision=precision_of(precision),
        device=device,
        sequence_length=length,
        micro_batch_size=micro_batch_size,
        split_backward=schedule.splits_backward,
        compiled=compile is not None,
        fp8_recipe=fp8_recipe,
    )
    stages = split_stages(config, schedule.placement, options)
    training = Training(
        grid=grid, data_parallel=data_parallel, data=data, recompute=recompute, adapters=adapters
    )
    return count_memory(sizes, training, schedule, stages)


def count_memory(
    sizes: Sizes, training: Training, schedule: Schedule, stages: Sequence[Sequence[str]]
) -> Memory:
    """Return the bytes on the ranks of every position of the pipeline, of options that fit
    together.

    Args:
        sizes: Model, layout and micro-batch.
        training: Ranks, data parallelism and recomputation.
        schedule: A proven table.
        stages: Units of every stage.
    """
    config, recipe, data = sizes.config, sizes.fp8_recipe, training.data
    alike = LikeUnits(config, training.recompute, recipe, training.adapters)

    def state_of(own: Sequence[Sequence[str]]) -> State | AdaptedState:
        if training.adapters is None:
            return state_of_units(
                config, training.grid, own, precision=sizes.precision, recipe=recipe,
                mode=training.data_parallel, options=data,
                num_microbatches=schedule.num_microbatches,
            )  # fmt: skip
        reshards = data.reshard_after_forward
        return AdaptedState(
            config, training.grid, own, adapters=training.adapters, precision=sizes.precision,
            mode=training.data_parallel, options=data,
            reshards=schedule.num_microbatches == 1 if reshards is None else reshards,
        )  # fmt: skip

    def kept_weights_of(own: Sequence[Sequence[str]]) -> float:
        units = [unit for stage in own for unit in stage]
        if training.data_parallel == "fsdp" or sizes.compiled:
            return 0.0
        cached = sum(cached_weight_bytes(config, sizes.layout, unit, recipe) for unit in units)
        if training.rounds_weights:
            count = sum(count_matrices(config, sizes.layout, unit) for unit in units)
            cached += sizes.precision.compute_bytes * count
        return cached

    # Stages with equal units have equal profiles: computed once, since a search asks for thousands
    # of layouts.
    profiles = alike.once_each(
        stages, lambda units: stage_profile(sizes, units, training.recompute)
    )
    if training.tower is not None:
        first = training.tower.added_to(profiles[0], sizes, training.adapters)
        profiles = [first, *profiles[1:]]
    owned = [
        tuple(stages[number] for number in schedule.placement.stages_of(pp_rank))
        for pp_rank in range(sizes.layout.pp)
    ]
    states = alike.once_each(owned, state_of)
    kept_weights = alike.once_each(owned, kept_weights_of)
    rows = []
    for pp_rank, state in enumerate(states):
        message = _message_bytes(sizes, schedule.placement.stages_of(pp_rank), stages)
        activations = kept_weights[pp_rank] + rank_peak(
            schedule, pp_rank, profiles, message_bytes=message, stream_bytes=sizes.stream_bytes
        )
        rows.append(RankMemory.of_state(pp_rank, state, activations, schedule.in_flight[pp_rank]))
    if training.tower is not None:
        begin = schedule.placement.pp_ranks[0]
        rows[begin] = _with_tower(rows[begin], training.tower, sizes, training)
    return Memory(tuple(rows))


def _with_tower(row: RankMemory, tower: TowerSizes, sizes: Sizes, training: Training) -> RankMemory:
    """Return the bytes of a rank of the first stage with the state of the tower."""
    state = tower.state(
        training.grid, training.adapters, sizes.precision, training.data_parallel, training.data
    )
    return replace(
        row,
        parameters=row.parameters + state.parameters.total,
        weights_bytes=row.weights_bytes + state.weights_bytes,
        gradients_bytes=row.gradients_bytes + state.gradients_bytes,
        optimizer_bytes=row.optimizer_bytes + state.optimizer_bytes,
    )


def _check_kinds(
    config: TransformerConfig,
    layout: ParallelLayout,
    data: DataParallelOptions,
    recompute: RecomputeOptions,
    pipeline: PipelineOptions,
) -> None:
    check_kind("config", config, TransformerConfig)
    check_kind("layout", layout, ParallelLayout)
    check_kind("data_parallel_options", data, DataParallelOptions)
    check_kind("recompute", recompute, RecomputeOptions)
    check_kind("pipeline_options", pipeline, PipelineOptions)


def _check_sizes(micro_batch_size: int, num_microbatches: int, sequence_length: int) -> None:
    counts = {
        "micro_batch_size": micro_batch_size,
        "num_microbatches": num_microbatches,
        "sequence_length": sequence_length,
    }
    for name, count in counts.items():
        if not is_count(count):
            raise ConfigError(f"{name} is {count!r}; it must be a positive integer.")


def _table(
    given: str | Sequence[str] | Schedule,
    layout: ParallelLayout,
    num_microbatches: int,
    options: PipelineOptions,
) -> Schedule:
    if isinstance(given, Schedule):
        return given
    return make_schedule(
        given,
        num_ranks=layout.pp,
        num_microbatches=num_microbatches,
        num_chunks=layout.vpp,
        microbatch_group_size=options.microbatch_group_size_per_vp_stage,
    )


def _message_bytes(sizes: Sizes, own: Sequence[int], stages: Sequence[Sequence[str]]) -> float:
    """Return the largest message to a rank: inputs of the rank's stages, and gradients of the next
    stages' inputs.
    """
    receivers = [stages[s] for number in own for s in (number, number + 1) if s < len(stages)]
    return sizes.stream_bytes * max(num_received(sizes.config, units) for units in receivers)
