"""A card: a header and items, each with a command, an expected and a measured value.

:func:`problems`, the validator, runs before a card is written and after a card was read: nothing
passes without a measured value within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_lightning.cards.header import FIELDS, SCHEMA, dump, read_record
from megatron_lightning.errors import DataError

Status = Literal["passed", "failed", "skipped"]
ITEMS: Mapping[str, str] = {
    "folder": "every tensor comes back from the model as it is in the folder",
    "logits": "logits are those of transformers, or of the reference",
    "fit": "a layout trains as one process of plain Lightning",
    "resume": "a run saved on one layout goes on in another",
    "lora": "adapters train on a layout as in one process",
    "merge": "a model with merged adapters is the model of peft",
    "text": "the engine continues prompts as transformers does",
}
"""Kinds of items -> claim. ``fit`` is followed by a layout: ``fit:tp2``."""
OF_CARD = ("model", "revision", "reduced")
"""Fields of a card's header, beside the common fields."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A claim and the measurement."""

    id: str
    """One of :data:`ITEMS`; ``fit:LAYOUT``."""
    command: str
    """Reruns this item alone."""
    expected: str
    """Reference of the comparison, in words."""
    measured: float | None
    """Difference between result and reference. None: nothing was measured."""
    tolerance: float | None
    """Largest value that passes."""
    reason: str
    """Reason for the tolerance."""
    status: Status
    why: str = ""
    """Reason for a failure or a skip."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values, to show a meaningful comparison."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Card:
    """Measured claims about a model."""

    header: Mapping[str, Any]
    items: Sequence[Item]

    @property
    def failed(self) -> list[str]:
        """Ids of the failed items."""
        return [item.id for item in self.items if item.status == "failed"]

    def values(self) -> dict[str, Any]:
        """Return the values of YAML and JSON.

        Raises:
            DataError: If the validator refuses the card.
        """
        found = {"header": dict(self.header), "items": [asdict(item) for item in self.items]}
        check(found, "the card")
        return found

    def write(self, path: Path) -> None:
        """Write YAML.

        Raises:
            DataError: If the validator refuses the card.
        """
        text = dump(self.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_card(path: str | Path) -> Card:
    """Return a written card.

    Raises:
        DataError: If the file is no card, or a card refused by the validator.
    """
    values = read_record(path)
    check(values, str(path))
    return Card(values["header"], [Item(**item) for item in values["items"]])


def check(values: Mapping[str, Any], name: str) -> None:
    """Check a card's plain values.

    Raises:
        DataError: Naming every refused value.
    """
    found = list(problems(values))
    if found:
        raise DataError(f"{name} is no valid card: {'; '.join(found)}.")


def kind_of(item: str) -> str:
    """Return the kind of an item's id, or "" of an unknown id."""
    kind, colon, layout = item.partition(":")
    is_known = kind in ITEMS and (bool(layout) if kind == "fit" else not colon)
    return kind if is_known else ""


def problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between a card's plain values and the schema."""
    header, items = values.get("header"), values.get("items")
    if not isinstance(header, Mapping) or not isinstance(items, list):
        yield "a card has a header and a list of items"
        return
    if header.get("schema") != SCHEMA:
        yield f"the schema is {header.get('schema')}, not {SCHEMA}"
    missing = [name for name in (*FIELDS, *OF_CARD) if name not in header]
    if missing:
        yield f"the header lacks {', '.join(missing)}"
    if not items:
        yield "there are no items"
    names = {one.name for one in fields(Item)}
    seen: set[str] = set()
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or set(item) != names:
            yield f"item {number} needs exactly the fields {', '.join(sorted(names))}"
            continue
        if item["id"] in seen:
            yield f"{item['id']} appears twice"
        seen.add(item["id"])
        yield from (f"{item['id']} {problem}" for problem in _problems_of(item))


def _problems_of(item: Mapping[str, Any]) -> Iterator[str]:
    measured, tolerance, status = item["measured"], item["tolerance"], item["status"]
    if not kind_of(str(item["id"])):
        yield f"is none of {', '.join(ITEMS).replace('fit', 'fit:LAYOUT')}"
    if not item["command"]:
        yield "has no command that reruns it"
    if status not in get_args(Status):
        yield f"has status {status!r}, which is none of {', '.join(get_args(Status))}"
    is_within = _is_number(measured) and _is_number(tolerance) and measured <= tolerance
    if status == "passed" and not _is_number(measured):
        yield f"passed without a measured value ({measured!r})"
    elif status == "passed" and not is_within:
        yield f"passed with {measured}, above its tolerance of {tolerance}"
    if status == "passed" and not (item["expected"] and item["reason"]):
        yield "passed without saying what was expected, or why its tolerance is what it is"
    if status == "failed" and is_within:
        yield f"failed with {measured}, within its tolerance of {tolerance}"
    if status == "skipped" and measured is not None:
        yield f"was skipped and has a measured value ({measured!r})"
    if status != "passed" and not item["why"]:
        yield f"is {status} without saying why"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
