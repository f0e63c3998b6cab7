"""Search the layouts of a recipe for a device, the fastest class first. No torch here.

Layouts are tried in the order of an estimate, and only until the rest is estimated too slow, so
that few need their memory counted and their schedule simulated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, TypeVar

from megatron_lightning.config import DataParallelOptions, PipelineOptions, RecomputeOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.mistakes import Errors
from megatron_lightning.models.blueprint import LAYER
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import unit_names
from megatron_lightning.planning.ledger.activation_memory import stage_profile
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.rank_parameters import split_stages
from megatron_lightning.planning.memory import Memory
from megatron_lightning.planning.planned_run import PlannedRun, Recipe
from megatron_lightning.planning.recipe_checks import (
    check_sizes,
    recipe_memory,
    recipe_sizes,
)
from megatron_lightning.planning.search.device_speeds import Speeds
from megatron_lightning.planning.search.devices import PlannedDevice
from megatron_lightning.planning.search.simulated import SimulatedSchedules
from megatron_lightning.planning.search.step_time import (
    StepModel,
    StepTime,
)
from megatron_lightning.planning.search.unit_cache import LikeUnits

Stages = Sequence[Sequence[str]]
"""Units of every stage."""
AnyRecipe = TypeVar("AnyRecipe", bound=PlannedRun)
BEST, SECOND = 1.10, 1.25
"""Limits of the classes, in units of the fastest layout's modelled time."""

_TRIED = 1.27  # layouts estimated slower than this multiple of the fastest are not tried
_MOST_CHUNKS, MOST_STAGES_RANKS = 16, 64
_LEAST_TOKENS = 2048  # of a sequence on a context-parallel rank
MICRO_BATCHES = (1, 2, 4)
_UNEVEN = 1.2  # of the fullest pipeline rank's layers to the mean

NOTHING = RecomputeOptions()
FEED_FORWARD = RecomputeOptions(recompute_granularity="selective", recompute_modules=("mlp",))
FULL = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
_RECOMPUTE = (NOTHING, FEED_FORWARD, FULL)
"""From fast and large to slow and small."""


@dataclass(frozen=True)
class FoundLayout:
    """A layout for the recipe's global batch."""

    recipe: PlannedRun
    memory: Memory
    time: StepTime

    def fits(self, device: PlannedDevice) -> bool:
        """Whether the fullest rank fits into a device."""
        return self.memory.total_bytes <= device.usable_bytes


@dataclass(frozen=True)
class SearchResult:
    """Fitting layouts, the fastest first, and the recipe's own layout."""

    layouts: tuple[FoundLayout, ...]
    own: FoundLayout | None
    """The recipe as written. None: the recipe cannot run."""
    fitting: FoundLayout | None
    """The recipe's layout with the least recomputation for the device's memory."""
    num_valid: int
    """Layouts that divide model and batch."""

    def ratio(self, found: FoundLayout) -> float:
        """Return the modelled time in units of the fastest layout's."""
        return found.time.seconds / self.layouts[0].time.seconds


class _Split(NamedTuple):
    """Partition of the model."""

    options: PipelineOptions
    stages: Stages


class LayoutSearch:
    """Search of the layouts of a recipe.

    Args:
        recipe: Model, global batch, number of ranks, and options untouched by the search.
        device: The device.

    Raises:
        ConfigError: For a recipe with a schedule of its own.
    """

    def __init__(self, recipe: Recipe, device: PlannedDevice) -> None:
        self._recipe = recipe
        self._device = device
        alike = LikeUnits(recipe.model, recipe.recompute, recipe.fp8_recipe, recipe.adapters)
        self._model = StepModel(Speeds.of_device(device.name), recipe.node_size, alike)
        self._schedules = SimulatedSchedules(recipe)
        self._splits: dict[tuple[int, int], _Split | None] = {}
        self._kept: dict[Hashable, float] = {}
        # Of a weight, quantized if possible, and its gradient.
        is_quantized = recipe.fp8_recipe is not None and recipe.fp8_recipe.fp8_param_gather
        weight = 1 if is_quantized else precision_of(recipe.precision).weight_bytes
        self._held_bytes = weight + (0 if recipe.adapters is not None else 4)
        self._whole = replace(recipe, layout=ParallelLayout(), world_size=1, micro_batch_size=1)
        units = unit_names(pipeline_units(recipe.model))
        self._totals = self._model.parameters(self._whole, units)

    def run(self) -> SearchResult:
        """Return the layouts that fit."""
        valid = list(self._candidates())
        usable = self._device.usable_bytes
        candidates = [one for one in valid if self._least_bytes(one[0]) <= usable]
        estimates = [self._model.estimate(one, split.stages) for one, split in candidates]
        layouts: list[FoundLayout] = []
        fastest = inf
        less: set[Hashable] = set()  # layouts that fit with less recomputation
        # Estimates are cheap and rank the candidates. Only the most promising are simulated, until
        # an estimate is clearly slower than the best result.
        for number in sorted(range(len(candidates)), key=estimates.__getitem__):
            if estimates[number] > _TRIED * fastest:
                break
            recipe, split = candidates[number]
            key = _without_recomputation(recipe)
            # More recomputation would only be slower.
            if key in less:
                continue
            layout = self._found(recipe, split.stages)
            if layout is not None and layout.fits(self._device):
                layouts.append(layout)
                less.add(key)
                fastest = min(fastest, layout.time.seconds)
        layouts.sort(key=lambda one: one.time.seconds)
        layouts_shown = [one for one in layouts if one.time.seconds <= SECOND * fastest]
        own_layout = self._own(self._recipe)
        fitting = (
            own_layout
            if own_layout is None or own_layout.fits(self._device)
            else self._own_with_less()
        )
        return SearchResult(tuple(layouts_shown), own_layout, fitting, len(valid))

    def _own_with_less(self) -> FoundLayout | None:
        """Return the recipe with the least recomputation for the device's memory."""
        changed = (replace(self._recipe, recompute=options) for options in _RECOMPUTE)
        own_layouts = (self._own(recipe) for recipe in changed)
        return next(
            (one for one in own_layouts if one is not None and one.fits(self._device)), None
        )

    def _own(self, recipe: Recipe) -> FoundLayout | None:
        """Return memory and time of the recipe's own layout. None: the layout cannot run."""
        errors = Errors()
        check_sizes(recipe, errors)
        placement = Placement.loop(recipe.layout.pp, recipe.layout.vpp)
        stages = errors.attempt(
            split_stages, recipe.model, placement, recipe.pipeline, ahead=recipe.ahead
        )
        return None if errors.found or stages is None else self._found(recipe, stages)

    def _found(self, recipe: Recipe, stages: Stages) -> FoundLayout | None:
        """Return memory and time of a layout. None: the schedule cannot run."""
        errors = Errors()
        replay = errors.attempt(self._schedules.replay, recipe)
        if replay is None:
            return None
        grid = RankGrid(recipe.layout, recipe.world_size)
        needed = recipe_memory(recipe, grid, replay.schedule, stages)
        return FoundLayout(recipe, needed, self._model.step(recipe, replay, stages))

    # ------------------------------------------------------------------------------- shared values

    def _least_bytes(self, recipe: Recipe) -> float:
        """Return less than the bytes of the fullest rank: quantized weights, gradients, and the
        activations of layers at the peak of the first stage.
        """
        layout = recipe.layout
        per_rank = self._totals.dense / (layout.tp * layout.pp)
        per_rank += self._totals.experts / (layout.etp * layout.ep * layout.pp)
        shards = 1
        if recipe.data_parallel == "fsdp":
            shards = recipe.world_size // (layout.tp * layout.pp)
        in_flight = min(layout.pp, recipe.num_microbatches) * layout.vpp
        if layout.vpp > 1:
            most = (layout.vpp - 1) * layout.pp + 2 * (layout.pp - 1) + 1
            in_flight = min(most, recipe.num_microbatches * layout.vpp)
        layers = self._recipe.model.num_layers // layout.num_stages
        return self._held_bytes * per_rank / shards + in_flight * layers * self._layer_bytes(recipe)

    def _layer_bytes(self, recipe: Recipe) -> float:
        """Return a lower bound of the bytes kept by a layer for a micro-batch."""
        layout = recipe.layout
        key = (
            layout.tp, layout.cp, layout.etp, layout.ep, layout.sp, recipe.micro_batch_size,
            recipe.recompute.recompute_granularity, tuple(recipe.recompute.recompute_modules),
        )  # fmt: skip
        if key not in self._kept:
            sizes = recipe_sizes(recipe, splits_backward=False)
            kinds = recipe.model.layer_kinds
            layers = [f"{LAYER}{kinds.index(kind)}" for kind in set(kinds)]
            kept_bytes = (stage_profile(sizes, [unit], recipe.recompute).kept for unit in layers)
            self._kept[key] = max(0.0, min(kept_bytes) - sizes.stream_bytes)
        return self._kept[key]

    def _split(self, pp: int, vpp: int) -> _Split | None:
        """Return the more equal of the two ways to spread layers. None: stages are too uneven."""
        if (pp, vpp) not in self._splits:
            self._splits[pp, vpp] = self._new_split(Placement.loop(pp, vpp))
        return self._splits[pp, vpp]

    def _new_split(self, placement: Placement) -> _Split | None:
        ways = []
        for counts in (False, True):
            options = PipelineOptions(
                account_for_embedding_in_pipeline_split=counts,
                account_for_loss_in_pipeline_split=counts,
            )
            try:
                stages = split_stages(
                    self._recipe.model, placement, options, ahead=self._recipe.ahead
                )
            except ConfigError:
                continue
            work = [0.0] * placement.num_ranks
            for pp_rank, units in zip(placement.pp_ranks, stages, strict=True):
                work[pp_rank] += self._model.microbatch(self._whole, units).forward
            ways.append((max(work) * len(work) / sum(work), counts, _Split(options, stages)))
        uneven, _, split = min(ways, key=lambda way: way[:2], default=(inf, False, None))
        return split if uneven <= _UNEVEN else None

    # ----------------------------------------------------------------------------------- candidates

    def _candidates(self) -> Iterator[tuple[Recipe, _Split]]:
        """Yield every valid layout with every way to shard data, recomputation and micro-batch."""
        recipe = self._recipe
        recomputed = [*_RECOMPUTE]
        recomputed += [] if recipe.recompute in recomputed else [recipe.recompute]
        sizes = sorted({*MICRO_BATCHES, recipe.micro_batch_size})
        for layout in self._layouts():
            split = self._split(layout.pp, layout.vpp)
            replicas = recipe.world_size // (layout.tp * layout.cp * layout.pp)
            batch_size, remainder = divmod(recipe.global_batch_size, replicas * recipe.accumulated)
            if split is None or remainder:
                continue
            base = replace(
                recipe, layout=layout, batch_size=batch_size, pipeline=split.options,
                data_parallel="zero1", data=without_fsdp(recipe.data),
            )  # fmt: skip
            # What a layout cannot do does not depend on the micro-batch: checked once for all
            # sizes.
            errors = Errors()
            check_sizes(base, errors)
            if errors.found:
                continue
            for size in sizes:
                if batch_size % size:
                    continue
                for mode in data_modes(base, replicas):
                    for recompute in recomputed:
                        yield replace(mode, micro_batch_size=size, recompute=recompute), split

    def _layouts(self) -> Iterator[ParallelLayout]:
        recipe = self._recipe
        own_layout, world, moe = recipe.layout, recipe.world_size, recipe.model.moe
        places = recipe.model.num_layers + 2
        longest = recipe.sequence_length // _LEAST_TOKENS
        # Chats with images are not divided among ranks that share rows.
        shares = powers_of_two(longest, own_layout.cp) if recipe.tower is None else [own_layout.cp]
        for tp in powers_of_two(recipe.node_size, own_layout.tp):
            for cp in shares:
                for pp in divisors(world // (tp * cp)) if world % (tp * cp) == 0 else []:
                    if pp > min(MOST_STAGES_RANKS, places):
                        break
                    for vpp in self._chunks(pp):
                        for experts in _expert_sizes(moe, own_layout, world // pp):
                            yield replace(
                                own_layout, tensor_model_parallel_size=tp, context_parallel_size=cp,
                                pipeline_model_parallel_size=pp,
                                virtual_pipeline_model_parallel_size=vpp,
                                sequence_parallel=(
                                    "auto" if tp == 1 else own_layout.sequence_parallel
                                ),
                                **experts,
                            )  # fmt: skip

    def _chunks(self, pp: int) -> list[int]:
        """Return the numbers of model chunks for equal layers, with or without places for embedding
        and loss. If no number divides the layers, return small numbers.
        """
        num_layers, own_layout = self._recipe.model.num_layers, self._recipe.layout
        if pp == 1:
            return [1]
        most = min(_MOST_CHUNKS, (num_layers + 2) // pp)
        even = [
            vpp
            for vpp in range(1, most + 1)
            if 0 in (num_layers % (pp * vpp), (num_layers + 2) % (pp * vpp))
        ]
        chunks = even or [vpp for vpp in (1, 2, 4) if vpp <= most]
        return sorted({*chunks, own_layout.vpp}) if own_layout.pp == pp else chunks


def _without_recomputation(recipe: Recipe) -> Hashable:
    """Return the distinguishing values of a layout, apart from recomputation."""
    return (
        recipe.layout, recipe.micro_batch_size, recipe.data_parallel,
        recipe.data.reshard_after_forward,
    )  # fmt: skip


def without_fsdp(data: DataParallelOptions) -> DataParallelOptions:
    """Return the options without those of fsdp."""
    return replace(data, reshard_after_forward=None, reduce_every_microbatch=False)


def data_modes(base: AnyRecipe, replicas: int) -> list[AnyRecipe]:
    """Return the recipe with zero1, and without a pipeline with fsdp."""
    if base.layout.pp > 1 or replicas * base.layout.cp == 1:
        return [base]
    data = replace(base.data, overlap_param_gather=False, reduce_every_microbatch=True)
    return [base] + [
        replace(base, data_parallel="fsdp", data=replace(data, reshard_after_forward=reshards))
        for reshards in (False, True)
    ]


def _expert_sizes(moe: Any, own: ParallelLayout, ranks: int) -> list[dict[str, Any]]:
    if moe is None:
        return [{"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}]
    etp = own.expert_tensor_parallel_size or 1
    return [
        {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
        for ep in powers_of_two(moe.num_experts, own.ep)
        if moe.num_experts % ep == 0 and ranks % (etp * ep) == 0
    ]


def powers_of_two(most: int, own: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``own``."""
    powers = [1]
    while powers[-1] * 2 <= most:
        powers.append(powers[-1] * 2)
    return sorted({*powers, own})


def divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [size for size in range(1, number + 1) if number % size == 0]
