"""Roles of messages, and values of rows: text, JSON text, tools, and a template's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError

ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")
_NO_OPTIONS = (
    "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of the rendering that are no values for the template."""


def text_of(row: Row, key: str, value: Any) -> str:
    """Return a value that must be text.

    Raises:
        DataError: If it is none.
    """
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {key} is a {type(value).__name__}; it must be text")
    return value


def json_of(row: Row, what: str, text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        DataError: If the text is no JSON; ``what`` names it.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{row.where}: {what} are no JSON: {error}") from error


def turns_of(row: Row, key: str) -> Any:
    """Return the turns of a conversation. Tables of text (CSV) hold the turns as JSON text."""
    turns = row.fields[key]
    return json_of(row, key, turns) if isinstance(turns, str) else turns


def tools_of(row: Row) -> list[Mapping[str, Any]] | None:
    """Return the tools of a row. None: it has none.

    Raises:
        DataError: If they are no list of objects, nor its JSON text.
    """
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        tools = json_of(row, "tools", tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{row.where}: tools must be a list of objects, or its JSON text")
    return tools


def template_options(row: Row) -> dict[str, Any]:
    """Return the row's values for the template.

    Raises:
        DataError: If they are no object, or name an argument of the rendering.
    """
    options = row.fields.get("chat_template_kwargs")
    if isinstance(options, str):
        options = json_of(row, "chat_template_kwargs", options) if options.strip() else None
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise DataError(f"{row.where}: chat_template_kwargs must be an object, or its JSON text")
    reserved = [name for name in options if name in _NO_OPTIONS]
    if reserved:
        raise DataError(
            f"{row.where}: chat_template_kwargs has {reserved[0]}, which is no value of the "
            "template; leave it out"
        )
    # Columns of structs have all keys of all rows.
    return {name: value for name, value in options.items() if value is not None}
