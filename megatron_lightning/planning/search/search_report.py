"""Text and JSON of a search for layouts. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.planning.search.devices import GIB, PlannedDevice
from megatron_lightning.planning.search.layout_search import BEST, SECOND, FoundLayout, SearchResult

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_SHOWN = (12, 6)  # lines of the first and of the second class
_STRATEGY = "--trainer.strategy.init_args."
_AXES = ("tp", "cp", "ep", "dp")


def search_sections(result: SearchResult, device: PlannedDevice) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "device": device.name,
        "usable": device.usable_bytes,
        "num_valid": result.num_valid,
        "layouts": [_values(result, one) for one in result.layouts],
        "own": None if result.own is None else _values(result, result.own),
        "own_that_fits": None if result.fitting is None else _values(result, result.fitting),
    }


def _values(result: SearchResult, found: FoundLayout) -> dict[str, Any]:
    recipe, ratio = found.recipe, result.ratio(found) if result.layouts else None
    layout, options = recipe.layout, recipe.recompute
    return {
        **{name: getattr(layout, name) for name in _SIZES},
        "data_parallel_size": layout.data_parallel_size(recipe.world_size),
        "micro_batch_size": recipe.micro_batch_size,
        "num_microbatches": recipe.num_microbatches,
        "data_parallel": recipe.data_parallel,
        "recompute": _recompute(options),
        "bytes": found.memory.total_bytes,
        "ratio": ratio,
        "class": None if ratio is None else 1 if ratio <= BEST else 2 if ratio <= SECOND else 3,
        "bubble": found.time.bubble,
        "communication": dict(found.time.communication),
        "options": options_of(found),
    }


def options_of(found: FoundLayout) -> list[str]:
    """Return the options of ``megatron-lightning fit`` for a layout."""
    recipe = found.recipe
    layout, pipeline, data = recipe.layout, recipe.pipeline, recipe.data
    values: dict[str, Any] = {name: getattr(layout, name) for name in _SIZES}
    if not recipe.has_experts:
        values = {name: value for name, value in values.items() if "expert" not in name}
    values |= {"micro_batch_size": recipe.micro_batch_size, "data_parallel": recipe.data_parallel}
    recompute = recipe.recompute
    for name in ("granularity", "modules", "method", "num_layers"):
        value = getattr(recompute, f"recompute_{name}")
        is_used = name != "modules" or recompute.recompute_granularity == "selective"
        if value is not None and is_used:
            values[f"recompute.recompute_{name}"] = list(value) if name == "modules" else value
    if recipe.data_parallel == "fsdp":
        for name in ("reshard_after_forward", "reduce_every_microbatch"):
            if getattr(data, name) is not None:
                values[f"data_parallel_options.{name}"] = getattr(data, name)
    if layout.pp > 1:
        for unit in ("embedding", "loss"):
            name = f"account_for_{unit}_in_pipeline_split"
            values[f"pipeline_options.{name}"] = getattr(pipeline, name)
    nodes = f"--trainer.num_nodes={recipe.num_nodes}"
    devices = f"--trainer.devices={recipe.node_size}"
    return [
        nodes,
        devices,
        *(f"{_STRATEGY}{name}={_word(value)}" for name, value in values.items()),
    ]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def _recompute(options: RecomputeOptions) -> str:
    if options.recompute_granularity is None:
        return "nothing"
    if options.recompute_granularity == "full":
        return "layers"
    return "+".join(options.recompute_modules)


def search_text(result: SearchResult, device: PlannedDevice, world_size: int) -> Iterator[str]:
    """Yield the lines of a result."""
    usable = f"{device.usable_bytes / GIB:.0f} GiB of {device.name}"
    if not result.layouts:
        yield (
            f"none of {result.num_valid:,} layouts of {world_size:,} ranks fits into {usable}. Use "
            "more ranks, a larger device, or shorter samples."
        )
        return
    yield f"{result.num_valid:,} layouts of {world_size:,} ranks, {usable} a rank"
    classes: list[list[FoundLayout]] = [[], []]
    for one in result.layouts:
        classes[result.ratio(one) > BEST].append(one)
    titles = (f"within {BEST - 1:.0%} of the best", f"within {SECOND - 1:.0%} of the best")
    for title, layouts, most in zip(titles, classes, _SHOWN, strict=True):
        if not layouts:
            continue
        yield ""
        hidden = len(layouts) - most
        yield f"{title}: {len(layouts)}{f', of which {most} are shown' if hidden > 0 else ''}"
        yield from _table(result, layouts[:most])
    yield ""
    yield from _own_text(result)
    yield ""
    yield "The first one is set by"
    yield from (f"  {option}" for option in options_of(result.layouts[0]))
    yield (
        "Times are modelled: published step times of dense models come out within 15 %, of models "
        "with experts within a factor of 2. Time the best class, for a GPTModel with "
        "PretrainDataModule(mock=True)."
    )


def _table(result: SearchResult, layouts: Sequence[FoundLayout]) -> Iterator[str]:
    heads = ["tp", "pp", "vp", "cp", "ep", "dp", "micro-batch", "data", "recompute", "GiB"]
    rows = [[*heads, "x best", "bubble", *(f"{axis} time" for axis in _AXES)]]
    for one in layouts:
        layout, recipe = one.recipe.layout, one.recipe
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep)
        replicas = layout.data_parallel_size(recipe.world_size)
        shares = (one.time.bubble, *(one.time.communication[axis] for axis in _AXES))
        mode = recipe.data_parallel + (", reshard" if recipe.data.reshard_after_forward else "")
        rows.append(
            [
                *map(str, (*sizes, replicas, recipe.micro_batch_size)), mode,
                _recompute(recipe.recompute), f"{one.memory.total_bytes / GIB:.1f}",
                f"{result.ratio(one):.2f}", *(f"{share:.1%}" for share in shares),
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells)


def _own_text(result: SearchResult) -> Iterator[str]:
    own_layout, fitting = result.own, result.fitting
    if own_layout is None:
        yield "This recipe's own layout cannot run; plan without --search says why."
        return
    if fitting is own_layout:
        yield f"This recipe's own layout: {result.ratio(own_layout):.2f} x the best"
    elif fitting is None:
        yield (
            f"This recipe's own layout needs {own_layout.memory.total_bytes / GIB:.1f} GiB, and no "
            "recomputation makes it fit"
        )
    else:
        yield (
            f"This recipe's own layout needs {own_layout.memory.total_bytes / GIB:.1f} GiB. It "
            f"fits with recomputation of {_recompute(fitting.recipe.recompute)}"
        )
    yield from _table(
        result, [own_layout] if fitting in (own_layout, None) else [own_layout, fitting]
    )
