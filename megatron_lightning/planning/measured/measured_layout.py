"""Memory and modelled time of a measured module under a layout. No torch here.

Weights, gradients and optimizer are counted as for a :class:`GPTModel`. Of what a unit keeps for
backward, tensors as wide as its input stay whole on tensor-parallel ranks, and the others are
shared. Times are the same roofline: operations at a share of the peak, kept bytes once through
memory in the forward and twice in the backward, and the same communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lightning import rules
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.measured import MeasuredModel, UnitMeasure
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.pipeline.schedules.replay import Replay
from megatron_lightning.planning.ledger.activation_memory import rank_peak
from megatron_lightning.planning.ledger.optimizer_memory import State, shards_of
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.rank_parameters import ParameterCount
from megatron_lightning.planning.ledger.tape import Profile
from megatron_lightning.planning.memory import Memory, RankMemory
from megatron_lightning.planning.planned_run import MeasuredRecipe
from megatron_lightning.planning.search.device_speeds import Speeds, link_speed
from megatron_lightning.planning.search.step_time import (
    GEMM_SHARE,
    HIDDEN_TENSOR,
    LINK_SHARE,
    MEMORY_SHARE,
    StepTime,
    UnitTime,
    step_time,
)

Stages = Sequence[Sequence[str]]
OUTSIDE = ""
"""Key of code and parameters outside of the units."""


def check_measured(recipe: MeasuredRecipe) -> RankGrid:
    """Return the grid of a recipe's ranks.

    Raises:
        ConfigError: If the sizes do not fit together, or the module has no formula for them.
    """
    layout, name = recipe.layout, recipe.model.name
    if layout.cp > 1 or layout.divides_experts:
        raise ConfigError(
            f"context_parallel_size is {layout.cp} and expert_model_parallel_size {layout.ep}; a "
            f"plan of {name} knows tensor, pipeline and data parallelism. Set both to 1, or plan a "
            "GPTModel."
        )
    grid = RankGrid(layout, recipe.world_size)
    rules.check_data_parallel(grid, recipe.data_parallel, recipe.data)
    if recipe.model.parameters(layout.tp) is None:
        raise ConfigError(
            f"tensor_model_parallel_size is {layout.tp}, and {name} cannot be divided so. Set it "
            'to 1, give the module a sharding_plan(), or set sharding_plan to "auto".'
        )
    return grid


class MeasuredLayout:
    """A measured module under the layout of a recipe.

    Args:
        recipe: A checked recipe.
        grid: The recipe's ranks.
        stages: Units of every stage.
        schedule: A proven table.
    """

    def __init__(
        self, recipe: MeasuredRecipe, grid: RankGrid, stages: Stages, schedule: Schedule
    ) -> None:
        self._recipe = recipe
        self._grid = grid
        self._stages = stages
        self._schedule = schedule
        self._model: MeasuredModel = recipe.model
        self._counts = recipe.model.parameters(recipe.layout.tp) or {}
        self._is_recomputed = recipe.recompute.recompute_granularity == "full"

    def _measures(self, stage: int) -> Iterator[UnitMeasure]:
        """Yield the measures of a stage's parts. Code outside of the units counts on the last."""
        yield from (self._model.units[unit] for unit in self._stages[stage])
        if self._is_last(stage):
            yield self._model.outside

    def _is_last(self, stage: int) -> bool:
        return stage == len(self._stages) - 1

    def _kept_bytes(self, measure: UnitMeasure) -> float:
        """Return the bytes of a micro-batch that a rank keeps without recomputation."""
        inner = measure.kept_inner_bytes / self._recipe.layout.tp
        return self._recipe.micro_batch_size * (measure.kept_stream_bytes + inner)

    def _recomputes(self, measure: UnitMeasure) -> bool:
        """Whether the backward runs this forward again. Code outside of the units runs once."""
        return self._is_recomputed and measure is not self._model.outside

    def _units_of(self, pp_rank: int) -> list[str]:
        """Return the units on a pipeline rank."""
        stages = self._schedule.placement.stages_of(pp_rank)
        return [unit for stage in stages for unit in self._stages[stage]]

    def parameters(self, stage: int) -> int:
        """Return the parameters of a stage on a rank. All ranks hold the parameters outside of the
        units, which count on the last stage.
        """
        units = [*self._stages[stage], *([OUTSIDE] if self._is_last(stage) else [])]
        return sum(self._counts[unit] for unit in units)

    # --------------------------------------------------------------------------------------- memory

    def memory(self) -> Memory:
        """Return the bytes on the ranks at every position of the pipeline."""
        schedule, recipe = self._schedule, self._recipe
        profiles = [self._profile(stage) for stage in range(len(self._stages))]
        messages = [self._message_bytes(stage) for stage in range(1, len(self._stages))]
        message = max(messages, default=0.0)
        rows = []
        for pp_rank in range(recipe.layout.pp):
            units = self._units_of(pp_rank)
            state = self._state(units)
            peak = rank_peak(
                schedule, pp_rank, profiles, message_bytes=message, stream_bytes=message
            )
            peak += self._rounded_bytes(units)
            rows.append(RankMemory.of_state(pp_rank, state, peak, schedule.in_flight[pp_rank]))
        return Memory(tuple(rows))

    def _rounded_bytes(self, units: Sequence[str]) -> float:
        """Return the bytes of the rounded weights of a pipeline run. Norms count, too."""
        recipe = self._recipe
        if not recipe.rounds_weights or recipe.data_parallel == "fsdp":
            return 0.0
        size = precision_of(recipe.precision).compute_bytes
        return float(size * sum(self._counts[unit] for unit in units))

    def _state(self, units: Sequence[str]) -> State:
        recipe = self._recipe
        shards = shards_of(self._grid, recipe.data_parallel, recipe.data)
        counts = {unit: ParameterCount(self._counts[unit]) for unit in units}
        outside_count = ParameterCount(self._counts[OUTSIDE])
        is_sharded = recipe.data_parallel == "fsdp" and shards[0] > 1
        return State(
            sum(counts.values(), outside_count),
            counts if is_sharded else {},
            dict.fromkeys(units, ParameterCount()),
            shards=shards,
            precision=precision_of(recipe.precision),
            options=recipe.data,
            num_microbatches=recipe.num_microbatches,
        )

    def _profile(self, stage: int) -> Profile:
        """Return the bytes of one micro-batch on a stage."""
        kept_bytes = working = 0.0
        for one in self._measures(stage):
            unit_bytes = self._kept_bytes(one)
            stream = self._recipe.micro_batch_size * one.stream_bytes
            kept_bytes += stream if self._recomputes(one) else unit_bytes
            again = unit_bytes if self._recomputes(one) else 0.0
            working = max(working, again + 2 * stream)
        return Profile(
            kept=kept_bytes, forward_peak=kept_bytes + working, backward_peak=kept_bytes + working
        )

    def _message_bytes(self, stage: int) -> float:
        unit = next(iter(self._stages[stage]), None)
        size = 0.0 if unit is None else self._model.units[unit].stream_bytes
        return self._recipe.micro_batch_size * size

    # ----------------------------------------------------------------------------------------- time

    def time(self, replay: Replay, speeds: Speeds) -> StepTime:
        """Return the modelled time of a step.

        Args:
            replay: Schedule of the simulated micro-batches.
            speeds: Speeds of the device.
        """
        recipe = self._recipe
        stage_times = [self._unit_time(stage, speeds) for stage in range(len(self._stages))]
        ranks = range(recipe.layout.pp)
        num_parameters = max(self._state(self._units_of(rank)).parameters.total for rank in ranks)
        sizes = [self._message_bytes(stage) for stage in range(1, len(self._stages))]
        reach = 2 * recipe.world_size // recipe.layout.pp  # of neighboring stages
        link = link_speed(speeds, reach, recipe.node_size) * LINK_SHARE
        message_s = max(sizes, default=0.0) / link
        return step_time(
            recipe, replay, each=stage_times, held=ParameterCount(num_parameters),
            message_s=message_s,
            speeds=speeds, node_size=recipe.node_size,
        )  # fmt: skip

    def _unit_time(self, stage: int, speeds: Speeds) -> UnitTime:
        recipe, tp = self._recipe, self._recipe.layout.tp
        samples = recipe.micro_batch_size
        is_half = precision_of(recipe.precision).compute_bytes == 2
        peak = speeds.bf16 * (1.0 if is_half else 0.5)  # TF32
        link = link_speed(speeds, tp, recipe.node_size) * LINK_SHARE
        total = UnitTime()
        for one in self._measures(stage):
            work = samples * one.forward_flops / tp / (peak * GEMM_SHARE)
            passes = 2 * self._kept_bytes(one) / (speeds.memory * MEMORY_SHARE)
            # Two all-reduces of the stream in each direction.
            message_time = (
                4 * samples * one.stream_bytes * (tp - 1) / tp / link * (1 - HIDDEN_TENSOR)
            )
            forward = work + passes + message_time
            again = forward if self._recomputes(one) else 0.0
            total = total.plus(
                UnitTime(
                    forward,
                    2 * work + 2 * passes + message_time + again,
                    (3 if again else 2) * message_time,
                )
            )
        return total


def operations(recipe: MeasuredRecipe) -> float:
    """Return the operations of a step over all ranks, forward and backward."""
    measures = [*recipe.model.units.values(), recipe.model.outside]
    return 3.0 * recipe.global_batch_size * sum(one.forward_flops for one in measures)
