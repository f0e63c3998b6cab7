"""Draw timelines of a pipeline run: as SVG text, as a PNG image, as a trace for Chrome's viewer. No
torch here.

A row for each pipeline rank, a bar for each action, labeled with the micro-batch. The color shows
the model chunk. The shade shows the kind: forward light, backward (or input gradient) middle,
weight gradient dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement

_SHADES: Sequence[Mapping[str, str]] = tuple(
    dict(zip(("light", "middle", "dark"), colors.split(), strict=True))
    for colors in (
        "#c3daf2 #5b9bd5 #2a5f94",
        "#fcdcb8 #f0984b #ad5d17",
        "#c8e8c4 #67b765 #2f7333",
        "#dfd3f0 #a07fcf #5f3d94",
        "#c2e8e8 #4fb0b0 #1f6f6f",
        "#f7cccc #e06c6c #9c2f2f",
        "#e5d8c8 #b3926b #6e5130",
        "#dcdcdc #9a9a9a #5a5a5a",
    )
)
_KINDS: Mapping[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("light", "forward"),
    Kind.BACKWARD: ("middle", "backward"),
    Kind.INPUT_GRADIENT: ("middle", "input gradient"),
    Kind.WEIGHT_GRADIENT: ("dark", "weight gradient"),
}
_ROW, _GAP, _MARGIN, _LABELS = 26, 4, 16, 110
_NARROWEST_LABEL, _WIDEST, _LEAST_WIDTH = 20, 6000, 900
_INK, _FAINT = "#222222", "#777777"

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Panel:
    """A timeline of a picture."""

    title: str
    placement: Placement
    spans: Mapping[Action, tuple[float, float]]
    """Start and end of every action."""


class Bar(NamedTuple):
    """A filled bar, in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Text(NamedTuple):
    """A line of text with the middle at y, in pixels."""

    x: float
    y: float
    text: str
    size: float
    anchor: Anchor
    fill: str


@dataclass(frozen=True)
class Scene:
    """Shapes of a picture."""

    width: float
    height: float
    shapes: tuple[Bar | Text, ...]


def draw(panels: Sequence[Panel], unit: str = "") -> Scene:
    """Lay out timelines from top to bottom, all with the same scale.

    Args:
        panels: The timelines.
        unit: Unit of the times, for the axis.
    """
    total = max((end for panel in panels for _, end in panel.spans.values()), default=1.0) or 1.0
    lengths = [
        end - start for panel in panels for start, end in panel.spans.values() if end > start
    ]
    scale = min(
        max(_NARROWEST_LABEL / min(lengths, default=total), _LEAST_WIDTH / total), _WIDEST / total
    )
    shapes: list[Bar | Text] = []
    y = float(_MARGIN)
    for panel in panels:
        shapes += _panel(panel, y, scale, total, unit)
        y += _panel_height(panel)
    shapes += _legend(panels, y)
    num_chunks = max(_num_chunks(panel.placement) for panel in panels)
    return Scene(
        _LABELS + total * scale + 2 * _MARGIN, y + num_chunks * 20 + _MARGIN, tuple(shapes)
    )


def svg(scene: Scene) -> str:
    """Return the scene as an SVG document."""

    def element(shape: Bar | Text) -> str:
        if isinstance(shape, Bar):
            x, y, width, height, fill = shape
            return (
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
                f'fill="{fill}"/>'
            )
        return (
            f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:.1f}" '
            f'text-anchor="{shape.anchor}" dominant-baseline="central" '
            f'fill="{shape.fill}">{escape(shape.text)}</text>'
        )

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width:.0f}" '
        f'height="{scene.height:.0f}" viewBox="0 0 {scene.width:.2f} {scene.height:.2f}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join(
        [
            head,
            '<rect width="100%" height="100%" fill="white"/>',
            *map(element, scene.shapes),
            "</svg>",
            "",
        ]
    )


def write_png(scene: Scene, path: Path) -> None:
    """Write the scene as a PNG image, at twice the size unless that is too large."""
    from PIL import Image, ImageDraw, ImageFont

    # Twice the size for sharp text, unless decoders of images refuse the width.
    factor = 2 if scene.width <= _WIDEST / 2 else 1
    image = Image.new(
        "RGB", (math.ceil(scene.width * factor), math.ceil(scene.height * factor)), "white"
    )
    canvas = ImageDraw.Draw(image)
    fonts = {
        shape.size: ImageFont.load_default(shape.size * factor)
        for shape in scene.shapes
        if isinstance(shape, Text)
    }
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for shape in scene.shapes:
        if isinstance(shape, Text):
            position = (shape.x * factor, shape.y * factor)
            canvas.text(
                position,
                shape.text,
                fill=shape.fill,
                font=fonts[shape.size],
                anchor=anchors[shape.anchor],
            )
        else:
            # Pillow draws both corners of a rectangle, so the far edges are one pixel nearer.
            right = (shape.x + shape.width) * factor - 1
            bottom = (shape.y + shape.height) * factor - 1
            left, top = shape.x * factor, shape.y * factor
            canvas.rectangle((left, top, max(left, right), max(top, bottom)), fill=shape.fill)
    image.save(path, optimize=True)


def chrome_trace(panels: Sequence[Panel], seconds_per_unit: float = 1e-3) -> str:
    """Return the timelines as JSON for ``chrome://tracing`` and Perfetto: a process a panel, a
    thread a pipeline rank.
    """
    events: list[dict[str, object]] = []
    for process, panel in enumerate(panels):
        events.append(
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": panel.title}}
        )
        for pp_rank in range(panel.placement.num_ranks):
            label = {"name": f"pp rank {pp_rank}"}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": pp_rank, "args": label}
            )
        for action, (start, end) in panel.spans.items():
            micros = 1e6 * seconds_per_unit
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": _KINDS[action.kind][1],
                    "pid": process,
                    "tid": panel.placement.pp_ranks[action.stage],
                    "ts": start * micros,
                    "dur": (end - start) * micros,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _num_chunks(placement: Placement) -> int:
    return max(len(placement.stages_of(pp_rank)) for pp_rank in range(placement.num_ranks))


def _panel_height(panel: Panel) -> float:
    return 28 + panel.placement.num_ranks * (_ROW + _GAP) + 30


def _panel(panel: Panel, top: float, scale: float, total: float, unit: str) -> Iterator[Bar | Text]:
    left_edge, rows = _MARGIN + _LABELS, top + 28
    placement = panel.placement
    yield Text(_MARGIN, top + 10, panel.title, 15, "start", _INK)
    chunk_of: dict[int, int] = {}
    for pp_rank in range(placement.num_ranks):
        stages, y = placement.stages_of(pp_rank), rows + pp_rank * (_ROW + _GAP)
        # Chunks of one rank get tones of their own, so that interleaving shows.
        chunk_of |= {stage: chunk for chunk, stage in enumerate(stages)}
        yield Text(_MARGIN, y + 8, f"pp rank {pp_rank}", 12, "start", _INK)
        # There is room.
        listed = (
            ", ".join(map(str, stages))
            if len(stages) < 5
            else f"{stages[0]}, {stages[1]} … {stages[-1]}"
        )
        yield Text(_MARGIN, y + 20, f"stage {listed}", 10, "start", _FAINT)
        yield Bar(left_edge, y, total * scale, _ROW, "#f4f4f4")
    for action, (start, end) in panel.spans.items():
        y, width = rows + placement.pp_ranks[action.stage] * (_ROW + _GAP), (end - start) * scale
        shade = _KINDS[action.kind][0]
        # A hair of background between neighbors, but at most half of a narrow bar.
        yield Bar(
            left_edge + start * scale,
            y,
            max(width - 1, width / 2),
            _ROW,
            _color(chunk_of[action.stage], shade),
        )
        label = str(action.microbatch)
        size = min(13.0, float(math.floor((width - 3) / (0.6 * len(label)))))
        if size >= 7:
            ink = _INK if shade == "light" else "#ffffff"
            yield Text(
                left_edge + start * scale + width / 2, y + _ROW / 2, label, size, "middle", ink
            )
    yield from _axis(rows + placement.num_ranks * (_ROW + _GAP), left_edge, scale, total, unit)


def _axis(y: float, left: float, scale: float, total: float, unit: str) -> Iterator[Bar | Text]:
    rough = 80 / scale
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for index in range(math.floor(total / step + 1e-9) + 1):
        x = left + index * step * scale
        yield Bar(x, y, 1, 4, _FAINT)
        yield Text(x, y + 12, f"{index * step:g}{unit}", 10, "middle", _FAINT)


def _legend(panels: Sequence[Panel], top: float) -> Iterator[Bar | Text]:
    kinds = [
        kind
        for kind in Kind
        if any(action.kind is kind for panel in panels for action in panel.spans)
    ]
    for chunk in range(max(_num_chunks(panel.placement) for panel in panels)):
        x, y = float(_MARGIN + _LABELS), top + chunk * 20
        yield Text(_MARGIN, y + 8, f"model chunk {chunk}", 12, "start", _INK)
        for kind in kinds:
            shade, name = _KINDS[kind]
            yield Bar(x, y, 16, 16, _color(chunk, shade))
            yield Text(x + 22, y + 8, name, 12, "start", _INK)
            x += 34 + 7 * len(name)


def _color(chunk: int, shade: str) -> str:
    return _SHADES[chunk % len(_SHADES)][shade]
