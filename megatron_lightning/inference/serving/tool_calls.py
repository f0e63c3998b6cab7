"""Calls of functions in the text of a model.

Parsed are JSON between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), and JSON that is the
whole text: an object, several objects or a list (Llama 3, Mistral). All else is text, and so is all
up to the last ``</think>``: the thoughts of a model may speak of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_END_OF_THOUGHT = "</think>"
_TAGGED = re.compile(rf"{_BEGIN}(.*?)(?:{_END}|\Z)", re.DOTALL)
_BETWEEN = " \t\r\n,;"
"""Characters between calls without tags."""


@dataclass(frozen=True)
class ToolCall:
    """A call."""

    name: str
    arguments: str
    """JSON of an object."""


def parse_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Return the text beside the calls, and the calls. A text with a call that cannot be parsed, or
    of an unknown function, is returned whole.

    Args:
        text: Text of the model.
        names: Names of the functions.
    """
    begin = _end_of_thoughts(text)
    place = text.find(_BEGIN, begin)
    if place >= 0:
        sources = _TAGGED.findall(text, place)
        beside = text[:place].rstrip() + _TAGGED.sub("", text[place:]).strip()
    else:
        sources, beside = [text[begin:]], text[:begin]
    calls: list[ToolCall] = []
    for source in sources:
        parsed = [_call_of(value, names) for value in _values_of(source)]
        calls += [call for call in parsed if call is not None]
        if not parsed or None in parsed:
            return text, []
    return (beside, calls) if calls else (text, [])


def place_of_calls(text: str) -> int:
    """Return the number of first characters that belong to no call, whatever follows the text,
    without white space before a call.
    """
    begin = _end_of_thoughts(text)
    if text[begin:].lstrip()[:1] in ("{", "["):
        return begin
    place = text.find(_BEGIN, begin)
    if place < 0:
        lengths = range(min(len(_BEGIN) - 1, len(text)), 0, -1)
        held = next((n for n in lengths if text.endswith(_BEGIN[:n])), 0)
        place = len(text) - held
    return len(text[:place].rstrip())


def _end_of_thoughts(text: str) -> int:
    """Return the number of first characters up to the last end of a thought. 0: there is none."""
    place = text.rfind(_END_OF_THOUGHT)
    return 0 if place < 0 else place + len(_END_OF_THOUGHT)


def _values_of(source: str) -> list[Any]:
    """Return the JSON values of a text, lists as their items. Empty: the text is no JSON."""
    decoder, values, place = json.JSONDecoder(), list[Any](), 0
    source = source.strip(_BETWEEN)
    while place < len(source):
        try:
            value, place = decoder.raw_decode(source, place)
        except (ValueError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
        while place < len(source) and source[place] in _BETWEEN:
            place += 1
    return values


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    """Return a call of JSON. None: the JSON is no call of a known function."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside of JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
