"""Balanced partition of a model's units into stages. No torch here.

A *unit* is a path in the pipelined module (``"embed"``, ``"layers.3"``) that is never split.
``pipeline_units()`` lists the units in the order of the forward. A unit's weight is the unit's
share of a stage's time. Units may state the ends of stages (:data:`STAGE_END`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_lightning.errors import ConfigError

Unit = str | tuple[str, float]
STAGE_END = "|"
"""Between two units: a stage ends here. The units then give all stages."""
_MOST_LISTED = 12


def unit_names(units: Sequence[Unit]) -> tuple[str, ...]:
    """Return the paths of units, without their weights and the ends of stages."""
    return tuple(unit if isinstance(unit, str) else unit[0] for unit in units if unit != STAGE_END)


def is_layer(name: str) -> bool:
    """Return whether a unit is a layer of a list: the last segment of the path is a number."""
    return name.rpartition(".")[2].isdigit()


def unit_weights(units: Sequence[Unit]) -> tuple[float, ...]:
    """Return the weight of every unit.

    Without a given weight, a layer of a list (see :func:`is_layer`) weighs 1 and any other unit 0.
    If all weights are 0, every unit weighs 1.
    """
    weights = []
    for unit in units:
        if unit == STAGE_END:
            continue
        weight = float(is_layer(unit)) if isinstance(unit, str) else unit[1]
        if weight < 0:
            raise ConfigError(
                f"pipeline unit {unit[0]!r} weighs {weight}; weights are shares of time. Set it to "
                "0 or more."
            )
        weights.append(weight)
    return tuple(weights) if any(weights) else (1.0,) * len(weights)


def partition_units(
    units: Sequence[Unit], num_stages: int, allows: Callable[[int], bool] = lambda _: True
) -> tuple[tuple[str, ...], ...]:
    """Partition the units into contiguous stages with weights as equal as possible. Return the unit
    paths of each stage.

    A stage begins only with a unit if ``allows`` accepts the unit's index.

    The heaviest stage is as light as possible. Among the remaining partitions the weights differ
    least (in squares), and then the earlier stages get more: 10 layers on 4 stages are 3, 3, 2, 2.
    Units without weight stay with the unit before, leading units without weight with the first
    stage.
    """
    names, weights = unit_names(units), unit_weights(units)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"the units list {repeated!r} twice; a unit runs on one stage. List it once."
        )
    # Units are a block if no stage may begin between the units.
    weighing: list[float] = []
    begins: list[bool] = []
    for index, weight in enumerate(weights):
        begins.append(weight > 0 and (not weighing or allows(index)))
        if begins[-1]:
            weighing.append(weight)
        elif weight > 0:
            weighing[-1] += weight
    if len(weighing) < num_stages:
        raise ConfigError(
            f"{num_stages} pipeline stages need at least {num_stages} layers, and the model lists "
            f"{len(weighing)} that may begin one ({_listed(names) or 'no unit at all'}). "
            "Set pipeline_model_parallel_size x virtual_pipeline_model_parallel_size to "
            f"{max(len(weighing), 1)} or less, or give the model more layers."
        )
    stage_ends = list(accumulate(_balanced_counts(weighing, num_stages)))
    stages: list[list[str]] = [[] for _ in range(num_stages)]
    stage = num_begun = 0
    for name, is_first in zip(names, begins, strict=True):
        if is_first:
            stage += num_begun == stage_ends[stage]
            num_begun += 1
        # Units without weight (embeddings, norms) stay with the block before them, and leading
        # units with the first block.
        stages[stage].append(name)
    return tuple(map(tuple, stages))


def _listed(names: Sequence[str]) -> str:
    listed = names if len(names) <= _MOST_LISTED else [*names[:3], "…", *names[-3:]]
    return ", ".join(listed)


def _balanced_counts(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return how many of ``weights`` each of the contiguous parts takes, by dynamic programming
    over suffixes.
    """
    sums = [0.0, *accumulate(weights)]
    total = len(weights)
    limit = _lightest_limit(sums, num_parts)
    infinity = float("inf")
    # cost[i]: least sum of squares of the parts that cover weights[i:]. count[k][i]: number of
    # weights that the first of k parts takes.
    cost = [infinity] * total + [0.0]
    counts: list[list[int]] = []
    for _ in range(num_parts):
        best, first = [infinity] * (total + 1), [0] * (total + 1)
        for start in range(total):
            for end in range(start + 1, total + 1):
                part = sums[end] - sums[start]
                if part > limit:
                    break
                if part * part + cost[end] <= best[start]:  # ties: the longest first part
                    best[start], first[start] = part * part + cost[end], end - start
        cost = best
        counts.append(first)
    taken, start = [], 0
    for first in reversed(counts):
        taken.append(first[start])
        start += first[start]
    return taken


def _lightest_limit(sums: Sequence[float], num_parts: int) -> float:
    """Return the least possible weight of the heaviest of ``num_parts`` contiguous, non-empty
    parts: the lightest limit under which greedy parts are enough.
    """
    total = len(sums) - 1

    def is_enough(limit: float) -> bool:
        start = 0
        for _ in range(num_parts):
            end = start + 1
            if end > total or sums[end] - sums[start] > limit:
                return start == total
            while end < total and sums[end + 1] - sums[start] <= limit:
                end += 1
            start = end
        return start == total

    limits = sorted(
        {sums[end] - sums[start] for start in range(total) for end in range(start + 1, total + 1)}
    )
    return limits[bisect_left(limits, True, key=is_enough)]
