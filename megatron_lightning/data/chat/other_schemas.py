"""Rows of ShareGPT and Alpaca as OpenAI's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from megatron_lightning.data.chat.row_values import ASSISTANT, SYSTEM_ROLES, json_of, text_of
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError

_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "ai": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
"""Role of ShareGPT -> role of OpenAI."""


def meant_role(role: str) -> str:
    """Return OpenAI's role for another word or spelling. An unknown role may be the template's
    own.
    """
    plain = role.strip().lower()
    known = _ROLES.get(plain)
    if known is None and plain in SYSTEM_ROLES:
        known = plain
    misspelled = get_close_matches(plain, ("user", ASSISTANT), n=1, cutoff=0.85)
    return known or next(iter(misspelled), role)


def openai_messages(row: Row, key: str, turns: Any) -> list[Any]:
    """Return turns as OpenAI's messages. ShareGPT's turns have ``from`` and ``value``."""
    turns = json_of(row, key, turns) if isinstance(turns, str) else turns
    if not isinstance(turns, list):
        raise DataError(f"{row.where}: {key} must be a list of turns")
    messages: list[Any] = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise DataError(f"{row.where}: turn {index} must be an object with from and value")
        # Some files mix both forms within one conversation.
        if "role" in turn:
            messages.append(turn)
            continue
        role, value = _ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None or not isinstance(value, str):
            raise DataError(
                f"{row.where}: turn {index} is from {turn.get('from')!r}; expected value as text, "
                f"from one of {', '.join(_ROLES)}"
            )
        settings = {key: turn[key] for key in ("weight", "train") if key in turn}
        if role == "function_call":
            call = json_of(row, f"the call of turn {index}", value)
            calls = call if isinstance(call, list) else [call]
            tool_calls = [{"type": "function", "function": one} for one in calls]
            messages.append(
                {"role": ASSISTANT, "content": "", "tool_calls": tool_calls, **settings}
            )
        else:
            messages.append({"role": role, "content": value, **settings})
    return messages


def with_system(row: Row, messages: Any) -> Any:
    """Return messages behind the row's ``system``, if there is one.

    Raises:
        DataError: If the messages begin with another system message.
    """
    system = row.fields.get("system")
    if not system or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        if first.get("content") == system:
            return messages
        raise DataError(
            f"{row.where}: the row has system, and the first message is a system message, too; "
            "keep one of them"
        )
    return [{"role": "system", "content": text_of(row, "system", system)}, *messages]


def alpaca_prompt(row: Row) -> list[Any]:
    """Return the messages before the answer of a row with ``instruction``."""
    fields = row.fields
    question = text_of(row, "instruction", fields["instruction"])
    if fields.get("input"):
        question = f"{question}\n{text_of(row, 'input', fields['input'])}"
    messages: list[Any] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": text_of(row, "system", fields["system"])})
    for pair in fields.get("history") or ():
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise DataError(f"{row.where}: history must be pairs of a question and an answer")
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": ASSISTANT, "content": pair[1]},
        ]
    return [*messages, {"role": "user", "content": question}]


def alpaca_messages(row: Row) -> list[Any]:
    """Return the messages of a row with ``instruction`` and ``output``."""
    answer = text_of(row, "output", row.fields["output"])
    return [*alpaca_prompt(row), {"role": ASSISTANT, "content": answer}]
