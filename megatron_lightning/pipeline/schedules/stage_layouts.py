"""Partition of a model into stages by the user's options. No torch here.

A *layout* is Megatron's notation, stage by stage: ``Et*3|(tt|)*29,mL``. ``E`` is the embedding,
``t`` a transformer layer, ``m`` a layer of multi-token prediction, ``L`` output layer and loss.
``|`` ends a stage, ``x*n`` and ``(…)*n`` repeat, commas and spaces mean nothing. Stage v * P + r is
chunk v of Megatron's pipeline rank r, as in the interleaved schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import (
    STAGE_END,
    Unit,
    is_layer,
    partition_units,
    unit_names,
    unit_weights,
)

KINDS: Mapping[str, str] = MappingProxyType(
    {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
)
"""Megatron's names of layer types by the letters of a layout."""

Layout = tuple[tuple[str, ...], ...]
"""For each stage the kinds of the stage's layers, values of :data:`KINDS`."""


def parse_layout(layout: str | Sequence[Sequence[str]]) -> Layout:
    """Return the kinds of layers of each stage.

    Args:
        layout: In Megatron's notation, or the equivalent lists of names.

    Raises:
        ConfigError: If a letter or name is unknown, if embedding and loss are not first and last,
            each once, or if the layers of multi-token prediction are not together behind the other
            layers.
    """
    if isinstance(layout, str):
        stages = tuple(
            tuple(KINDS[letter] for letter in stage) for stage in _expand(layout).split("|")
        )
    else:
        stages = tuple(map(tuple, layout))
    kinds = [kind for stage in stages for kind in stage]
    unknown = next((kind for kind in kinds if kind not in KINDS.values()), None)
    if unknown is not None:
        raise ConfigError(
            f"pipeline layout {layout!r} has {unknown!r}. Use the names "
            f"{', '.join(KINDS.values())}."
        )
    if not stages[0] or kinds[0] != "embedding" or kinds.count("embedding") > 1:
        raise ConfigError(
            f"pipeline layout {layout!r} does not begin with its only embedding: tokens enter "
            "there. Write E first and once."
        )
    if not stages[-1] or kinds[-1] != "loss" or kinds.count("loss") > 1:
        raise ConfigError(
            f"pipeline layout {layout!r} does not end with its only loss: the last stage has it. "
            "Write L last and once."
        )
    predicting = [stage for stage in stages if "mtp" in stage]
    if len(predicting) > 1 or (predicting and "decoder" in kinds[kinds.index("mtp") :]):
        raise ConfigError(
            f"pipeline layout {layout!r} has m in {len(predicting)} stages or before a layer t; "
            "multi-token prediction continues from the last layer's output. Write all m in one "
            "stage, behind the last t."
        )
    return stages


def split_units(
    units: Sequence[Unit],
    placement: Placement,
    options: PipelineOptions,
    allows: Callable[[int], bool] = lambda _: True,
) -> tuple[tuple[str, ...], ...]:
    """Return the unit paths of every stage, as the units say, by the options, or else balanced by
    :func:`partition_units`. A balanced stage begins only with a unit if ``allows`` accepts the
    unit's index.
    """
    if STAGE_END in units:
        return _by_ends(units, placement, options)
    kinds = [_kind(name) for name in unit_names(units)]
    num_layers, num_predicting = kinds.count("decoder"), kinds.count("mtp")
    first = options.num_layers_in_first_pipeline_stage
    last = options.num_layers_in_last_pipeline_stage
    if options.pipeline_model_parallel_layout is not None:
        layout = parse_layout(options.pipeline_model_parallel_layout)
        _check_layout(layout, placement, num_layers, num_predicting)
        return _by_slots(units, layout)
    if first is not None or last is not None:
        counts = _uneven_counts(num_layers, placement, first, last)
        stages = [("decoder",) * count for count in counts]
        return _by_slots(units, (*stages[:-1], (*stages[-1], *("mtp",) * num_predicting)))
    return partition_units(_counted(units, options), placement.num_stages, allows)


def _expand(text: str) -> str:
    letters = re.sub(r"[\s,]", "", text)
    previous = ""
    while previous != letters:  # from the innermost parentheses outwards
        previous = letters
        letters = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), letters)
    letters = re.sub(r"([^()*])\*(\d+)", lambda match: match[1] * int(match[2]), letters)
    unknown = next((letter for letter in letters if letter not in {*KINDS, "|"}), None)
    if unknown is not None:
        raise ConfigError(
            f"pipeline layout {text!r} has {unknown!r} where a layer belongs. Write E, t, m, L and "
            "|, repeated as in t*3 or (tt|)*4."
        )
    return letters


def _kind(name: str) -> str | None:
    """Return "decoder" or "mtp" for a layer, None for any other unit."""
    if not is_layer(name):
        return None
    return "mtp" if is_predicting(name) else "decoder"


def is_predicting(name: str) -> bool:
    """Return whether a unit belongs to multi-token prediction."""
    return "mtp" in name.split(".")


def _check_layout(
    layout: Layout, placement: Placement, num_layers: int, num_predicting: int
) -> None:
    ranks, stages = placement.num_ranks, placement.num_stages
    _check_number("the pipeline layout", len(layout), placement)
    for kind, letter, num_listed in (("decoder", "t", num_layers), ("mtp", "m", num_predicting)):
        num_written = sum(stage.count(kind) for stage in layout)
        if num_written != num_listed:
            raise ConfigError(
                f"the pipeline layout has {num_written} layers {letter} ({kind}), and "
                f"pipeline_units() lists {num_listed}. Write {num_listed}."
            )
    predicting = next((index for index, stage in enumerate(layout) if "mtp" in stage), stages)
    if predicting < stages - ranks:
        raise ConfigError(
            f"the pipeline layout has m in stage {predicting}, and only the last model chunks, "
            f"stages {stages - ranks} to {stages - 1}, can hold it. Move it there."
        )


def _check_number(owner: str, number: int, placement: Placement) -> None:
    """Check that ``owner`` has as many stages as the placement."""
    ranks, stages = placement.num_ranks, placement.num_stages
    if number == stages:
        return
    if number % ranks == 0:
        fix = (
            f"Set virtual_pipeline_model_parallel_size to {number // ranks}, or write {stages} "
            "stages"
        )
    else:
        below = number // ranks * ranks
        fix = (
            f"Write {f'{below} or ' if below else ''}{below + ranks} stages, a multiple of the "
            "ranks"
        )
    raise ConfigError(
        f"{owner} has {number} stages, and {ranks} pipeline ranks with {stages // ranks} model "
        f"chunks each hold {stages}. {fix}."
    )


_DIVIDING = (
    "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip


def _by_ends(
    units: Sequence[Unit], placement: Placement, options: PipelineOptions
) -> tuple[tuple[str, ...], ...]:
    """Return the stages that the units state. One stage takes all units."""
    if placement.num_stages == 1:
        return (unit_names(units),)
    for name in _DIVIDING:
        value = getattr(options, name)
        if value not in (None, False):
            raise ConfigError(
                f"{name} is {value}, and the model states its stages ({STAGE_END} in "
                "layer_pattern). Leave one of them out."
            )
    stages: list[list[Unit]] = [[]]
    for unit in units:
        if unit == STAGE_END:
            stages.append([])
        else:
            stages[-1].append(unit)
    _check_number("the model's pattern of layers", len(stages), placement)
    return tuple(map(unit_names, stages))


def _by_slots(units: Sequence[Unit], layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Put each layer on the next place of the layer's kind. Units before the layers go to the first
    stage, units behind the layers to the last, and other units to the stage of the layer before.
    """
    names = unit_names(units)
    kinds = [_kind(name) for name in names]
    places = {
        kind: iter([s for s, stage in enumerate(layout) for _ in range(stage.count(kind))])
        for kind in ("decoder", "mtp")
    }
    last_layer = max((index for index, kind in enumerate(kinds) if kind), default=-1)
    stages: list[list[str]] = [[] for _ in layout]
    stage = 0
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind is not None:
            stage = next(places[kind])
        elif index > last_layer:
            stage = len(layout) - 1
        stages[stage].append(name)
    return tuple(map(tuple, stages))


def _uneven_counts(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> list[int]:
    """Return the layers of each stage if the first or the last pipeline rank takes a given
    number.
    """
    ranks, chunks = placement.num_ranks, placement.num_stages // placement.num_ranks
    if placement != Placement.loop(ranks, chunks) or ranks == 1:
        raise ConfigError(
            f"num_layers_in_first_pipeline_stage={first} and "
            f"num_layers_in_last_pipeline_stage={last} are for a first and a last pipeline rank, "
            f"and with the stages on {placement.pp_ranks} they are one. Set "
            "pipeline_model_parallel_layout."
        )
    set_counts = {0: first, ranks - 1: last}
    middle = [rank for rank in range(ranks) if set_counts.get(rank) is None]
    for name, count in (("first", first), ("last", last)):
        if count is not None and count % chunks:
            below = count // chunks * chunks
            raise ConfigError(
                f"num_layers_in_{name}_pipeline_stage={count} cannot be divided among {chunks} "
                f"model chunks. Set it to {f'{below} or ' if below else ''}{below + chunks}."
            )
    num_left = num_layers - (first or 0) - (last or 0)
    if num_left < len(middle) * chunks or (num_left and not middle):
        raise ConfigError(
            f"num_layers_in_first_pipeline_stage={first} and "
            f"num_layers_in_last_pipeline_stage={last} leave {num_left} of {num_layers} layers for "
            f"{len(middle)} other pipeline ranks with {chunks} model chunks each. Change the two "
            f"so that {f'{len(middle) * chunks} or more are' if middle else 'none is'} left."
        )
    # The earliest stages take the remainder. In a loop placement, stage s is on rank s % ranks.
    per_stage, extra = divmod(num_left, max(1, len(middle) * chunks))
    counts = []
    for stage in range(placement.num_stages):
        count = set_counts.get(stage % ranks)
        if count is None:
            counts.append(per_stage + (extra > 0))
            extra -= extra > 0
        else:
            counts.append(count // chunks)
    return counts


def _head(names: Sequence[str]) -> int:
    """Return the index of the predicting unit: the last unit outside of multi-token prediction. The
    losses of multi-token prediction come behind the unit.
    """
    return max(index for index, name in enumerate(names) if not is_predicting(name))


def _counted(units: Sequence[Unit], options: PipelineOptions) -> list[tuple[str, float]]:
    """Return the units with weights. Embedding and loss weigh as much as a layer if the options
    count them.
    """
    names, weights = unit_names(units), list(unit_weights(units))
    layers = [index for index, name in enumerate(names) if is_layer(name)] or [0]
    for wanted, index, position in (
        (options.account_for_embedding_in_pipeline_split, layers[0] - 1, "before the first"),
        (options.account_for_loss_in_pipeline_split, _head(names), "after the last"),
    ):
        if not wanted:
            continue
        if index in {-1, layers[-1]}:
            raise ConfigError(
                f"account_for_{'embedding' if index < layers[0] else 'loss'}_in_pipeline_split is "
                f"set, and pipeline_units() lists nothing {position} layer ({', '.join(names)}). "
                "Unset it, or give the units weights."
            )
        weights[index] += 1.0
    return list(zip(names, weights, strict=True))
