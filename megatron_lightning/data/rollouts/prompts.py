"""Prompts of rollouts: rows of the chat formats, rendered up to the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.conversations import Chat, text_messages
from megatron_lightning.data.chat.other_schemas import alpaca_prompt, openai_messages
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.images.image_parts import image_column
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError

_KEYS = frozenset({"prompt_ids", "prompt", "messages", "conversations", "instruction"})


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what rewards get of it."""

    ids: Sequence[int]
    shown: Any
    """Messages, a text, or ids: as the row has it."""
    row: Mapping[str, Any]
    """All fields of the row."""
    where: str = ""
    """Place of the row, for errors."""


def prompt_of(row: Row, tokenizer: ChatTokenizer | None, template: ChatTemplate | None) -> Prompt:
    """Return the prompt of a row: ``prompt_ids``, a text ``prompt`` (taken unchanged), or messages
    in ``prompt``, ``messages``, ``conversations`` or ``instruction``, without answers at the end.

    Args:
        row: The row.
        tokenizer: Of the model. None: the row has ids.
        template: Of conversations. None: there is none.

    Raises:
        DataError: If the row has no prompt, has an image or a sound, or needs a tokenizer or a
            template.
    """
    if row.error is not None:
        raise row.error
    fields = row.fields
    column, _ = image_column(row.where, fields)
    if column:
        raise DataError(
            f"{row.where} has an image or a sound in the column {column}, and a policy reads and "
            "writes text alone. Remove the column, or give it another name if it has neither."
        )
    if "prompt_ids" in fields:
        given = [int(value) for value in fields["prompt_ids"]]
        return Prompt(given, fields["prompt_ids"], fields, row.where)
    if tokenizer is None:
        raise DataError(
            f"{row.where}: the prompt is text, and neither the data nor the model have a "
            "tokenizer. Set tokenizer of RolloutDataModule, or write prompt_ids."
        )
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        [(ids, _)] = tokenizer.encode([prompt])
        return Prompt([*tokenizer.begin, *ids.tolist()], prompt, fields, row.where)
    messages = _messages(row)
    if template is None:
        raise DataError(
            f"{row.where}: the prompt has messages, and the tokenizer has no chat template. Set "
            "chat_template, or write the prompt as text."
        )
    texts = text_messages(row, messages)
    chat = Chat(row.where, texts, fields.get("tools"), options=_options(fields))
    text, _ = template.render(chat, texts, prompt=True)
    [(ids, _)] = tokenizer.encode([text])
    return Prompt(ids.tolist(), messages, fields, row.where)


def row_prompt(row: Row, tokenizer: ChatTokenizer, template: ChatTemplate | None) -> Prompt:
    """Return the prompt of a row for an environment, which may have its own.

    The arguments are those of :func:`prompt_of`.
    """
    if row.error is None and not _KEYS & row.fields.keys():
        return Prompt([], [], row.fields, row.where)
    return prompt_of(row, tokenizer, template)


def _messages(row: Row) -> list[Any]:
    """Return the messages of a row before its last answer."""
    fields = row.fields
    for key in ("prompt", "messages", "conversations"):
        if key in fields:
            messages = openai_messages(row, key, fields[key])
            break
    else:
        if "instruction" not in fields:
            raise DataError(
                f"{row.where}: the keys are {sorted(fields)}; a prompt is prompt_ids, prompt, "
                "messages, conversations or instruction."
            )
        messages = alpaca_prompt(row)
    while messages and messages[-1].get("role") == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{row.where}: no message is left before the answer.")
    return messages


def _options(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    options = fields.get("chat_template_kwargs")
    return options if isinstance(options, Mapping) else {}
