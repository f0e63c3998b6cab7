"""A card as a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lightning.cards.card import ITEMS, Card, Item, kind_of
from megatron_lightning.cards.header import headline, with_header


def page_of(card: Card) -> str:
    """Return a card as a page in Markdown, with the header at the top."""
    return with_header("\n".join(_lines(card)) + "\n", card.header)


def _lines(card: Card) -> Iterator[str]:
    header = card.header
    yield f"# {header['model']}, {header['date'][:10]}"
    yield ""
    yield f"Revision {header['revision']}. {headline(header)}."
    yield ""
    yield f"Reduced: {header['reduced'] or 'nothing'}."
    yield ""
    yield "| item | status | measured | tolerance | seconds | claim |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for item in card.items:
        yield (
            f"| {item.id} | {item.status} | {_number(item.measured)} | {_number(item.tolerance)} | "
            f"{item.seconds:.0f} | {ITEMS[kind_of(item.id)]} |"
        )
    for item in card.items:
        yield from _lines_of(item)


def _lines_of(item: Item) -> Iterator[str]:
    yield ""
    yield f"## {item.id}: {item.status}"
    yield ""
    if item.why:
        yield f"{item.why}"
        yield ""
    if item.expected:
        yield f"Expected: {item.expected}. Measured: {_number(item.measured)}."
    if item.reason:
        yield f"Tolerance: {_number(item.tolerance)}: {item.reason}."
    if item.details:
        yield f"Beside it: {', '.join(f'{k} {_shown(v)}' for k, v in item.details.items())}."
    yield ""
    yield "```bash"
    yield item.command
    yield "```"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2g}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
