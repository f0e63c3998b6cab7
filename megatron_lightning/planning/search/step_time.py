"""Modelled time of a training step, to compare layouts of a model on a cluster. No torch here.

A roofline: GEMMs at a share of the peak that grows with their size, attention, element-wise
operations by bytes, and communication by bytes and link, partly hidden. The pipeline is simulated
with these times. Shares of the peaks are round numbers from public measurements of H100s, chosen
with the published step times in view. Dense models come out within 15 % of published step times and
models with experts within a factor of 2, so only ratios of layouts mean anything, and small
differences mean nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.blueprint import OUTPUT, unit_weights
from megatron_lightning.models.costs import active_size, pair_channels, visible_pairs
from megatron_lightning.pipeline.schedules.replay import Replay
from megatron_lightning.planning.ledger.rank_parameters import (
    ParameterCount,
    config_of,
    count_unit,
    kind_of,
)
from megatron_lightning.planning.planned_run import PlannedRun, Recipe
from megatron_lightning.planning.search.device_speeds import Speeds, link_speed
from megatron_lightning.planning.search.unit_cache import LikeUnits

GEMM_SHARE, _FP8_GEMM, _BF16_OUTPUT, _ATTENTION, MEMORY_SHARE = 0.72, 0.62, 0.70, 0.55, 0.75
"""Reached shares of the peaks."""
_GEMM_OVERHEAD_S = 12e-6  # launch, quantization and tail
LINK_SHARE = 0.7  # reached share of a link's speed
HIDDEN_TENSOR = 0.5  # share of tensor-parallel communication behind GEMMs
_SHOWN_RING = 0.3  # least share of a ring's messages that attention does not hide
_SHOWN_DATA = 0.25  # share of gradients and parameters that a step does not hide
_HIDDEN_SHARDS = 0.8  # share of the pipeline's time behind which fsdp's traffic hides
_ADAPTED = 0.02  # share of parameters that adapters train
_STEP_BYTES = 32  # read and written by Adam for a parameter
_STEP_S = 0.01  # the optimizer's launches
_MOST_SIMULATED = 4
"""Simulated micro-batches, in units of the pipeline ranks. More repeat the same pattern."""


class UnitTime(NamedTuple):
    """Seconds of a micro-batch in a unit, on a rank."""

    forward: float = 0.0
    backward: float = 0.0
    tp: float = 0.0
    """Tensor-parallel communication, part of forward and backward."""
    cp: float = 0.0
    """Context-parallel communication, part of forward and backward."""
    ep: float = 0.0
    """Expert-parallel communication, part of forward and backward."""

    def plus(self, other: UnitTime) -> UnitTime:
        """Return the sums."""
        return UnitTime(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepTime:
    """Modelled time of a step."""

    seconds: float
    """Only ratios between layouts mean anything."""
    bubble: float
    """Idle share of the pipeline."""
    communication: Mapping[str, float]
    """Axis -> share of the step in communication not hidden by computation."""


@dataclass(frozen=True)
class _UnitModel:
    """Roofline of one unit."""

    recipe: Recipe
    speeds: Speeds
    node_size: int

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, not divided by tensor-parallel ranks."""
        recipe = self.recipe
        return recipe.micro_batch_size * recipe.sequence_length / recipe.layout.cp

    def time(self, unit: str) -> UnitTime:
        """Return the time of a micro-batch."""
        if unit == OUTPUT:
            return self._output()
        if kind_of(self.recipe.model, unit) is None:
            return UnitTime()
        return self._layer(unit)

    def _output(self) -> UnitTime:
        config, tp = self.recipe.model, self.recipe.layout.tp
        tokens = self.tokens * (1 + config.num_predicting_layers)
        logits = tokens * config.vocab_size / tp
        product = 2 * logits * config.hidden_size / (self.speeds.bf16 * _BF16_OUTPUT)
        passes = 8 * logits / (self.speeds.memory * MEMORY_SHARE)  # fp32, written and read
        return UnitTime(product + passes, 2 * product + passes)

    def _layer(self, unit: str) -> UnitTime:
        recipe, config, layout = self.recipe, self.recipe.model, self.recipe.layout
        h, tp, tokens = config.hidden_size, layout.tp, self.tokens
        weights = unit_weights(config, unit)
        of_experts = [one for one in weights if one.experts is not None]
        dense_weights = [one for one in weights if one.experts is None]
        in_mlp = [one for one in dense_weights if ".mlp." in f".{one.path}"]
        attending = [one for one in dense_weights if ".mlp." not in f".{one.path}"]
        projections = self._products(active_size(config, attending), tokens, h, h / tp)
        width = config.ffn_size if not of_experts else h
        feed_forward = self._products(active_size(config, in_mlp), tokens, h, 2 * width / tp)
        ep = 0.0
        if of_experts and config.moe is not None:
            num_sent = tokens * config.moe.router_topk / tp
            rows = num_sent * layout.etp * layout.ep / config.moe.num_experts
            width, columns = config.expert_hidden_size, 2 * config.expert_ffn_size / layout.etp
            feed_forward += self._products(
                active_size(config, of_experts), tokens, width, columns, rows
            )
            feed_forward += 12 * num_sent * (width + config.expert_ffn_size) / self._memory
            ep = self._exchanged(2 * 2 * num_sent * width, layout.ep, layout.etp)
        else:
            feed_forward += 16 * tokens * config.ffn_size / tp / self._memory
        stream = 28 * tokens * h / tp / self._memory
        window = config_of(config, unit).window_size
        pairs = visible_pairs(recipe.sequence_length, window) * pair_channels(config)
        attention = 2 * pairs * recipe.micro_batch_size / (tp * layout.cp)
        attention /= self.speeds.bf16 * _ATTENTION
        gathers = 2 if of_experts and layout.etp == 1 else 4
        tensor = gathers * 2 * tokens * h * (tp - 1) / tp / (self._link(tp) * LINK_SHARE)
        tensor *= 1 - HIDDEN_TENSOR
        ring = self._ring(attention)
        forward = projections + feed_forward + attention + stream + tensor + ring + ep
        grows = 1 if recipe.adapters is not None else 2
        backward = grows * (projections + feed_forward) + 2.5 * attention + 1.5 * stream
        backward += tensor + ring + ep
        again = self._recomputed(forward, attention, feed_forward + ep)
        is_full = recipe.recompute.recompute_granularity == "full"
        times = 3 if is_full else 2
        return UnitTime(forward, backward + again, times * tensor, times * ring, times * ep)

    @property
    def _memory(self) -> float:
        return self.speeds.memory * MEMORY_SHARE

    def _products(
        self, size: float, tokens: float, k: float, n: float, rows: float | None = None
    ) -> float:
        """Return the time of GEMMs with ``size`` weights in total. A single GEMM is [rows, k] by
        [k, n].
        """
        if not size:
            return 0.0
        is_fp8 = self.recipe.fp8_recipe is not None
        peak = self.speeds.fp8 if is_fp8 else self.speeds.bf16
        flop = 2.0 * (tokens if rows is None else max(rows, 1.0)) * k * n
        share = (_FP8_GEMM if is_fp8 else GEMM_SHARE) * flop / (flop + peak * _GEMM_OVERHEAD_S)
        return 2.0 * tokens * size / self.recipe.layout.tp / (peak * share)

    def _ring(self, attention: float) -> float:
        """Return the time of keys and values around the context-parallel ranks."""
        layout, config = self.recipe.layout, self.recipe.model
        if layout.cp == 1:
            return 0.0
        size = 2 * 2 * self.tokens * config.query_groups * config.head_dim
        if config.mla is not None:
            size = (
                2
                * self.tokens
                * config.num_attention_heads
                * (config.mla.q_head_dim + config.mla.v_head_dim)
            )
        link = self._link(layout.tp * layout.cp) * LINK_SHARE
        time = size / layout.tp * (layout.cp - 1) / link
        # Outputs of the steps are merged in fp32: two are read, and one is written.
        channels = config.num_attention_heads * _value_dim(config) / layout.tp
        merged = 12 * self.tokens * channels * (layout.cp - 1) / self._memory
        return merged + max(_SHOWN_RING * time, time - attention * (layout.cp - 1) / layout.cp)

    def _exchanged(self, size: float, num_ranks: int, stride: int) -> float:
        """Return the time of two all-to-alls of together ``size`` bytes on a rank."""
        if num_ranks == 1:
            return 0.0
        share_inside = min(max(self.node_size // stride, 1), num_ranks) / num_ranks
        speeds = self.speeds
        return size * (
            (1 - share_inside) / (speeds.network * 0.6) + share_inside / (speeds.link * 0.6)
        )

    def _recomputed(self, forward: float, attention: float, feed_forward: float) -> float:
        options = self.recipe.recompute
        if options.recompute_granularity == "full":
            return forward
        if options.recompute_granularity is None:
            return 0.0
        names = set(options.recompute_modules)
        time = attention if names & {"core_attn", "self_attention"} else 0.0
        return time + (feed_forward if names & {"mlp", "moe"} else 0.0)

    def _link(self, reach: int) -> float:
        """Return the speed of the link between ``reach`` neighboring ranks."""
        return link_speed(self.speeds, reach, self.node_size)


@dataclass(frozen=True)
class _Work:
    """Time and parameters of the units on a stage."""

    time: UnitTime
    parameters: ParameterCount


class StepModel:
    """Modelled steps of the layouts of a model.

    Args:
        speeds: Speeds of the device.
        node_size: Devices of a node.
        alike: Keys of like units.
    """

    def __init__(self, speeds: Speeds, node_size: int, alike: LikeUnits) -> None:
        self._speeds = speeds
        self._node_size = node_size
        self._alike = alike
        self._units: dict[Hashable, _Work] = {}
        self._known: dict[Hashable, _Work] = {}
        self._fullest: dict[Hashable, tuple[ParameterCount, Sequence[Sequence[str]]]] = {}

    def microbatch(self, recipe: Recipe, units: Sequence[str]) -> UnitTime:
        """Return the time of a micro-batch in a stage."""
        return self._work(recipe, units).time

    def parameters(self, recipe: Recipe, units: Sequence[str]) -> ParameterCount:
        """Return the parameters of a stage on a rank."""
        return self._work(recipe, units).parameters

    def estimate(self, recipe: Recipe, stages: Sequence[Sequence[str]]) -> float:
        """Return the seconds of a step without a simulation: the slowest rank's work, and the
        warm-up.
        """
        stage_times = self._each(recipe, stages)
        pp = recipe.layout.pp
        work = _by_rank([one.forward + one.backward for one in stage_times], pp)
        warm_up = sum(work) / len(stage_times) * (pp - 1)
        pipeline = recipe.num_microbatches * max(work) + warm_up
        parameters = self._held(recipe, stages)
        exposed, optimizer = between_runs(
            recipe, parameters, self._speeds, self._node_size, pipeline
        )
        return recipe.accumulated * pipeline + exposed + optimizer

    def step(self, recipe: Recipe, replay: Replay, stages: Sequence[Sequence[str]]) -> StepTime:
        """Return the modelled time of a step.

        Args:
            recipe: The recipe.
            replay: Schedule of :func:`simulated_microbatches`.
            stages: Units of every stage.
        """
        stage_times, parameters = self._each(recipe, stages), self._held(recipe, stages)
        message_s = self._message_seconds(recipe)
        return step_time(
            recipe, replay, each=stage_times, held=parameters, message_s=message_s,
            speeds=self._speeds,
            node_size=self._node_size,
        )  # fmt: skip

    def _work(self, recipe: Recipe, units: Sequence[str]) -> _Work:
        """Return the sums over the units of a stage. Stages alike are computed once."""
        layout, sizes = recipe.layout, _sizes_of_work(recipe)
        keys = tuple(map(self._alike.key, units))
        if (sizes, keys) not in self._known:
            total = _Work(UnitTime(), ParameterCount())
            for key, unit in zip(keys, units, strict=True):
                if (sizes, key) not in self._units:
                    model = _UnitModel(recipe, self._speeds, self._node_size)
                    count = count_unit(recipe.model, layout, unit)
                    self._units[sizes, key] = _Work(model.time(unit), count)
                one = self._units[sizes, key]
                total = _Work(total.time.plus(one.time), total.parameters + one.parameters)
            self._known[sizes, keys] = total
        return self._known[sizes, keys]

    def _each(self, recipe: Recipe, stages: Sequence[Sequence[str]]) -> list[UnitTime]:
        """Return the time of a micro-batch in every stage."""
        return self._alike.once_each(stages, lambda units: self.microbatch(recipe, units))

    def _held(self, recipe: Recipe, stages: Sequence[Sequence[str]]) -> ParameterCount:
        """Return the parameters of the fullest rank."""
        layout = recipe.layout
        key = layout.tp, layout.ep, layout.etp, layout.pp, id(stages)
        if key not in self._fullest:
            counts = self._alike.once_each(stages, lambda units: self.parameters(recipe, units))
            ranks = (sum(counts[rank :: layout.pp], ParameterCount()) for rank in range(layout.pp))
            # Keeping the stages keeps their identity from being reused.
            self._fullest[key] = max(ranks, key=lambda count: count.total), stages
        return self._fullest[key][0]

    def _message_seconds(self, recipe: Recipe) -> float:
        """Return the time of a message between stages."""
        layout = recipe.layout
        size = 2.0 * recipe.micro_batch_size * recipe.sequence_length * recipe.model.hidden_size
        size /= layout.cp * (layout.tp if layout.sp else 1)
        reach = recipe.world_size // layout.pp  # distance of neighboring stages
        return size / (self._link(2 * reach) * LINK_SHARE)

    def _link(self, reach: int) -> float:
        return link_speed(self._speeds, reach, self._node_size)


def step_time(
    recipe: PlannedRun,
    replay: Replay,
    *,
    each: Sequence[UnitTime],
    held: ParameterCount,
    message_s: float,
    speeds: Speeds,
    node_size: int,
) -> StepTime:
    """Return the modelled time of a step.

    Args:
        recipe: The recipe.
        replay: Schedule of :func:`simulated_microbatches`.
        each: Time of a micro-batch in every stage.
        held: Parameters of the fullest rank.
        message_s: Time of a message between stages.
        speeds: Speeds of the device.
        node_size: Devices of a node.
    """
    forward, backward = [one.forward for one in each], [one.backward for one in each]
    work = _by_rank(list(map(sum, zip(forward, backward, strict=True))), recipe.layout.pp)
    simulated = replay.run_time(forward, backward, message_s)
    more = recipe.num_microbatches - replay.schedule.num_microbatches
    pipeline = simulated + more * max(work)
    busy = recipe.num_microbatches * sum(work) / len(work)
    exposed, optimizer = between_runs(recipe, held, speeds, node_size, pipeline)
    total = recipe.accumulated * pipeline + exposed + optimizer
    runs = recipe.accumulated * recipe.num_microbatches / len(work) / total
    shares = {axis: runs * sum(getattr(one, axis) for one in each) for axis in ("tp", "cp", "ep")}
    return StepTime(total, max(0.0, 1 - busy / pipeline), {**shares, "dp": exposed / total})


def between_runs(
    recipe: PlannedRun, held: ParameterCount, speeds: Speeds, node_size: int, pipeline: float
) -> tuple[float, float]:
    """Return the time of reductions and gathers over data-parallel ranks that nothing hides, and of
    the optimizer.

    Args:
        recipe: The recipe.
        held: Parameters of the fullest rank.
        speeds: Speeds of the device.
        node_size: Devices of a node.
        pipeline: Time of a pipeline run.
    """
    layout, pp = recipe.layout, recipe.layout.pp
    shards = recipe.world_size // (layout.tp * pp)
    expert_shards = max(1, recipe.world_size // (layout.etp * layout.ep * pp))
    trained = _ADAPTED if recipe.adapters is not None else 1.0
    num_sent = (held.dense if shards > 1 else 0) + (held.experts if expert_shards > 1 else 0)
    link = link_speed(speeds, recipe.world_size // pp, node_size) * LINK_SHARE
    if recipe.data_parallel == "fsdp":
        runs = recipe.accumulated * recipe.num_microbatches
        reshards = recipe.data.reshard_after_forward
        gathers = 2 * runs if reshards or (reshards is None and runs == 1) else 1
        reductions = runs if recipe.data.reduce_every_microbatch else 1
        traffic = num_sent * (2 * gathers + 4 * trained * reductions) / link
        first = traffic / max(gathers, reductions)
        exposed = max(_SHOWN_DATA * first, traffic - _HIDDEN_SHARDS * pipeline)
    else:
        exposed = _SHOWN_DATA * num_sent * (2 + 2) * trained / link
    own_share = held.dense / shards + held.experts / expert_shards
    if recipe.data_parallel == "ddp":
        own_share = float(held.total)
    return exposed, trained * own_share * _STEP_BYTES / (speeds.memory * MEMORY_SHARE) + _STEP_S


def _value_dim(config: TransformerConfig) -> int:
    return config.head_dim if config.mla is None else config.mla.v_head_dim


def simulated_microbatches(recipe: PlannedRun) -> int:
    """Return the number of simulated micro-batches. Further micro-batches repeat the pattern."""
    return min(recipe.num_microbatches, _MOST_SIMULATED * recipe.layout.pp)


def _sizes_of_work(recipe: Recipe) -> tuple[Hashable, ...]:
    """Return the sizes with an effect on the work in a unit, for a given model and length."""
    layout, recompute = recipe.layout, recipe.recompute
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.sp, recipe.micro_batch_size,
        recompute.recompute_granularity, tuple(recompute.recompute_modules),
    )  # fmt: skip


def _by_rank(stages: Sequence[float], pp: int) -> list[float]:
    """Return the sums on the pipeline ranks. A loop places a rank's stages pp apart."""
    return [sum(stages[rank::pp]) for rank in range(pp)]
