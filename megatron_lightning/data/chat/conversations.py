"""Rows as conversations, texts or tokens: the schemas of fine-tuning data.

A conversation has OpenAI's form: messages with ``role`` and ``content``, ``tool_calls`` in answers,
and ``tools`` beside the messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.data.chat.other_schemas import (
    alpaca_messages,
    meant_role,
    openai_messages,
    with_system,
)
from megatron_lightning.data.chat.row_values import (
    ASSISTANT,
    json_of,
    template_options,
    text_of,
    tools_of,
    turns_of,
)
from megatron_lightning.data.images.image_parts import TYPES, ImageSource, RowImages
from megatron_lightning.data.rows.sources import Row, without_missing
from megatron_lightning.errors import DataError

PARSER_VERSION = 6
"""Part of the name of cached documents. A change in the rows accepted here, or in the content
returned for a row, raises the version: a cached file is not parsed again."""
_SCHEMAS = (
    "messages (OpenAI), conversations (ShareGPT), instruction and output (Alpaca), prompt and "
    "completion, text, or input_ids"
)
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of the reasoning in a message."""
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", *REASONING)
"""Keys of an answer that needs no content."""
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
"""Reasoning inside of a message's content."""


@dataclass(frozen=True)
class Chat:
    """A conversation, and the trained answers."""

    where: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    trained: frozenset[int] = field(default_factory=frozenset)
    """Positions of the messages with a loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values for the template from the row's ``chat_template_kwargs``."""
    functions: Any = None
    """The row's ``functions``, an older form of tools that templates do not read."""
    nulls: int = 0
    """Arguments of tool calls left out for the value null."""
    images: Sequence[ImageSource] = ()
    """Images in the order of their places."""
    num_unplaced: int = 0
    """Images of the row's column without a place."""
    placeholder: str = ""
    """Text for the place of an image in messages that are text. Empty: unknown."""


@dataclass(frozen=True)
class Text:
    """Text without a template: a prompt without a loss, and the completion."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """A tokenized row."""

    where: str
    ids: Sequence[int]
    labels: Sequence[int]
    """Labels of the same length and not shifted, as in ``transformers``. -100 means no loss."""


def parse_row(row: Row) -> Chat | Text | Tokens:
    """Return the content of a row, by the row's keys.

    Raises:
        DataError: If the keys match no schema, or a value does not fit the schema.
    """
    fields = row.fields
    if "input_ids" in fields:
        return _tokens(row)
    if str(fields.get("label")).lower() == "false" and "text" not in fields:
        raise DataError(
            f"{row.where}: label is false, which marks an answer to avoid (data of KTO), and "
            "fine-tuning would train it. Leave such rows out, or train them by UnpairedDataModule."
        )
    if "messages" in fields:
        return _chat(row, "messages", with_system(row, turns_of(row, "messages")))
    if "conversations" in fields:
        turns = openai_messages(row, "conversations", fields["conversations"])
        return _chat(row, "conversations", with_system(row, turns))
    if "instruction" in fields and "output" in fields:
        return _chat(row, "instruction", alpaca_messages(row))
    if "prompt" in fields and "completion" in fields:
        return _completion(row)
    if "text" in fields:
        return Text(row.where, "", text_of(row, "text", fields["text"]))
    raise DataError(
        f"{row.where}: the keys {sorted(fields)} are of no known schema; expected {_SCHEMAS}"
    )


def _chat(row: Row, key: str, messages: Any, answers_from: int = 0) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.where}: {key} must be a list of messages, and not an empty one")
    made, trained, nulls, images = [], set(), 0, RowImages(row.where, row.fields)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{row.where}: message {index} of {key} must be an object with role and content"
            )
        _check_message(row, index, message)
        if message["role"] == ASSISTANT and index >= answers_from and _counts(row, index, message):
            trained.add(index)
        made.append(_message(row, index, message, images))
        nulls += sum(map(_nulls, message.get("tool_calls") or ()))
    functions = row.fields.get("functions") or None
    return Chat(
        row.where,
        made,
        tools_of(row),
        frozenset(trained),
        template_options(row),
        functions,
        nulls,
        images.sources,
        images.num_left,
    )


def _check_message(row: Row, index: int, message: Mapping[str, Any]) -> None:
    """Refuse a message that would be rendered as an empty one, or by a role of ShareGPT.

    Raises:
        DataError: If the message has no content, or the role is another word or spelling for user
            or assistant, or has capitals or white space beside a known role.
    """
    role = message["role"]
    meant = meant_role(role)
    if meant != role and (meant in ("user", ASSISTANT) or meant == role.strip().lower()):
        raise DataError(
            f"{row.where}: message {index} has the role {role!r}, which templates do not know and "
            f"which has no loss; write {meant!r}"
        )
    if message.get("content") is not None or role == "tool":
        return
    if role != ASSISTANT or not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
        raise DataError(
            f"{row.where}: message {index} of the role {role!r} has no content, but the keys "
            f"{sorted(message)}; write its text as content"
        )


def _counts(row: Row, index: int, message: Mapping[str, Any]) -> bool:
    """Return whether a message's own ``weight`` (OpenAI) or ``train`` keeps the message in the
    loss.
    """
    for name in ("weight", "train"):
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise DataError(
                f"{row.where}: message {index} has {name}={value!r}; an answer counts (1) or does "
                "not (0)"
            )
        if value is not None and not value:
            return False
    return True


def _message(row: Row, index: int, message: Mapping[str, Any], images: RowImages) -> dict[str, Any]:
    """Return a message for templates: text as content, with a character in the place of an image,
    and arguments of calls as objects.
    """
    # Templates ask whether a key is there, and files have keys of the value null.
    fields = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("weight", "train")
    }
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = "".join(_part(row, index, part, images) for part in content)
    elif isinstance(content, str):
        fields["content"] = images.placed(index, content)
    elif content is None:
        fields["content"] = ""
    else:
        raise DataError(
            f"{row.where}: the content of message {index} is a {type(content).__name__}; it must "
            "be text"
        )
    if fields.get("tool_calls"):
        calls = fields["tool_calls"]
        if not isinstance(calls, Sequence):
            raise DataError(f"{row.where}: tool_calls of message {index} must be a list")
        fields["tool_calls"] = [_call(row, index, call) for call in calls]
    return fields


def _part(row: Row, index: int, part: Any, images: RowImages) -> str:
    if isinstance(part, Mapping) and part.get("type") in TYPES:
        return images.part(index, part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return images.placed(index, part["text"])
    part_type = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(
        f"{row.where}: message {index} has a part of the type {part_type!r}, which is no text, "
        "image or sound; remove it"
    )


def _call(row: Row, index: int, call: Any) -> dict[str, Any]:
    """Return a call with the arguments as an object. OpenAI's files have JSON text, and templates
    write JSON themselves.
    """
    given = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(given, Mapping):
        raise DataError(f"{row.where}: a tool call of message {index} must be an object")
    function = dict(given)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = json_of(
            row, f"the arguments of a call in message {index}", arguments
        )
    elif arguments is not None:
        function["arguments"] = without_missing(arguments)
    return {**call, "function": function} if "function" in call else function


def _nulls(call: Any) -> int:
    """Return the number of null arguments of a call. Columns of structs have all keys of all calls,
    and JSON lines written from such columns do. JSON text was written by the caller.
    """

    def count(value: Any) -> int:
        items = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            return 0
        is_object = isinstance(value, dict)
        return sum(count(one) if one is not None else is_object for one in items)

    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return count(function.get("arguments")) if isinstance(function, Mapping) else 0


def text_messages(row: Row, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for templates, of text alone.

    Raises:
        DataError: If a message, or the row, has an image or a sound, or content that is no text.
    """
    images = RowImages(row.where, row.fields)
    made = [_message(row, index, message, images) for index, message in enumerate(messages)]
    if images.sources or images.num_left:
        where = images.sources[0].where if images.sources else row.where
        raise DataError(
            f"{where} has an image or a sound, and a policy reads and writes text alone. Remove it."
        )
    return made


def _completion(row: Row) -> Chat | Text:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        for name in ("system", "tools"):
            if row.fields.get(name):
                raise DataError(
                    f"{row.where}: the row has {name} beside a prompt that is text, which no "
                    f"template renders; make the prompt a list of messages, or leave {name} out"
                )
        return Text(row.where, prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = with_system(row, [*prompt, *completion])
        num_before = len(messages) - len(completion)
        return _chat(row, "prompt and completion", messages, num_before)
    raise DataError(
        f"{row.where}: prompt is a {type(prompt).__name__} and completion a "
        f"{type(completion).__name__}; both must be text, or both lists of messages"
    )


def _tokens(row: Row) -> Tokens:
    ids, labels = row.fields["input_ids"], row.fields.get("labels")
    labels = ids if labels is None else labels
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise DataError(f"{row.where}: {name} must be a list of integers")
    if len(ids) != len(labels):
        raise DataError(
            f"{row.where}: {len(ids)} input_ids and {len(labels)} labels; there must be a label "
            "for every id, not shifted"
        )
    wrong_entries = [
        at
        for at, (one, label) in enumerate(zip(ids, labels, strict=True))
        if label not in (one, -100)
    ]
    if wrong_entries:
        raise DataError(
            f"{row.where}: labels[{wrong_entries[0]}] is {labels[wrong_entries[0]]} and "
            f"input_ids[{wrong_entries[0]}] {ids[wrong_entries[0]]}; labels are the ids "
            "themselves, not shifted, or -100"
        )
    return Tokens(row.where, ids, labels)
