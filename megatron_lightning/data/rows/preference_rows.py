"""Rows with a chosen and a rejected answer, as two conversations or texts behind one prompt."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from math import isfinite, nan
from typing import Any, cast

from megatron_lightning.data.chat.conversations import Chat, Text, parse_row
from megatron_lightning.data.chat.other_schemas import alpaca_prompt, openai_messages
from megatron_lightning.data.chat.row_values import ASSISTANT, SYSTEM_ROLES
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError

SIDES = ("chosen", "rejected")
_WANTED = "prompt, chosen and rejected, each a text or a list of messages"
_HEADER = re.compile(r"\n\n(Human|Assistant):")
"""Header of a turn in the dialogs of HH-RLHF."""
_OTHER_NAMES = ("messages", "conversations", "input_ids", "instruction", "history", *SIDES)

Message = Mapping[str, Any]


def parse_pair(row: Row) -> tuple[Chat | Text, Chat | Text]:
    """Return the two answers of a row, each behind the prompt.

    Raises:
        DataError: If the keys are not those of a preference, or a value does not fit.
    """
    fields = row.fields
    if not all(side in fields for side in SIDES):
        if "completion" in fields and "label" in fields:
            raise DataError(
                f"{row.where}: completion and label are single answers, which UnpairedDataModule "
                f'reads for DPOModule(loss="kto"); expected {_WANTED}'
            )
        raise DataError(f"{row.where}: the keys are {sorted(fields)}; expected {_WANTED}")
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and all(isinstance(fields[side], str) for side in SIDES):
        texts = (_behind(row, prompt, fields[side]) for side in SIDES)  # without a template
        return cast("tuple[Text, Text]", tuple(texts))
    answers = [_answer(row, side) for side in SIDES]
    prompt = _prompt(row, answers)
    if prompt is None:
        prompt, answers = _common(row, answers)
    else:
        prompt, answers = _once(row, prompt, answers)
    chosen, rejected = (_behind(row, prompt, answer) for answer in answers)
    return chosen, rejected


def margins_of(rows: Iterable[Row], used: Collection[int]) -> list[float] | None:
    """Return the entry ``margin`` of each row, NaN for unused rows. None: no used row has one.

    Args:
        rows: All rows of a source, broken ones as well.
        used: Numbers of the rows with documents.

    Raises:
        DataError: If some used rows have none, or one is no number.
    """
    given = [
        (row.where, row.fields.get("margin")) if number in used else None
        for number, row in enumerate(rows)
    ]
    if all(entry is None or entry[1] is None for entry in given):
        return None
    return [nan if entry is None else _margin(*entry) for entry in given]


def _margin(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise DataError(
            f"{where}: margin is {value!r}, and other rows have one; write a number in all rows, 0 "
            "for none, or in no row"
        )
    return float(value)


def _answer(row: Row, side: str) -> list[Message]:
    """Return an answer as messages: the whole conversation, or what is behind the prompt."""
    answer = row.fields[side]
    if isinstance(answer, Mapping):  # LLaMA-Factory
        answer = [answer]
    if isinstance(answer, list):
        return openai_messages(row, side, answer)
    if not isinstance(answer, str):
        raise DataError(f"{row.where}: {side} is a {type(answer).__name__}; expected {_WANTED}")
    is_alone = all(row.fields.get(key) is None for key in ("prompt", *_OTHER_NAMES[:4]))
    return (is_alone and _dialog(answer)) or [{"role": ASSISTANT, "content": answer}]


def _dialog(text: str) -> list[Message]:
    """Return the messages of a dialog of HH-RLHF. Empty: the text is none."""
    begin, *pieces = _HEADER.split("\n\n" + text.lstrip())
    roles = {"Human": "user", "Assistant": ASSISTANT}
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [] if begin else [{"role": roles[who], "content": said.strip()} for who, said in turns]


def _prompt(row: Row, answers: Sequence[Sequence[Message]]) -> list[Message] | None:
    """Return the messages of the prompt. None: the answers hold the prompt."""
    fields = row.fields
    if prompt := fields.get("prompt"):
        is_text = isinstance(prompt, str)
        return [_user(prompt)] if is_text else openai_messages(row, "prompt", prompt)
    if any(answer and answer[0]["role"] != ASSISTANT for answer in answers):
        return None
    for key in ("conversations", "messages"):  # LLaMA-Factory
        if fields.get(key):
            return openai_messages(row, key, fields[key])
    return alpaca_prompt(row) if "instruction" in fields else None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _common(
    row: Row, answers: Sequence[list[Message]]
) -> tuple[list[Message], list[list[Message]]]:
    """Return the common first messages of two conversations, and the rest of each."""
    if any(isinstance(row.fields[side], str) for side in SIDES) and len(min(answers, key=len)) < 2:
        raise DataError(
            f"{row.where}: there is no prompt, and chosen and rejected are no conversations that "
            f"would hold one; expected {_WANTED}"
        )
    pairs = zip(*answers, strict=False)
    num_shared = len(list(takewhile(lambda pair: _is_same(*pair), pairs)))
    num_shared = min(num_shared, *(len(answer) - 1 for answer in answers))
    prompt, rests = answers[0][:num_shared], [answer[num_shared:] for answer in answers]
    asks = any(rest[0]["role"] == "user" for rest in rests)
    if not prompt or (asks and prompt[-1]["role"] != ASSISTANT):
        raise DataError(
            f"{row.where}: chosen and rejected begin with different messages, so that the prompt "
            "is not known; add prompt"
        )
    return prompt, rests


def _once(
    row: Row, prompt: list[Message], answers: Sequence[list[Message]]
) -> tuple[list[Message], list[list[Message]]]:
    """Return the prompt, and the answers behind the prompt. Many data sets repeat the prompt in the
    answers, with a system message before it or other white space.

    Raises:
        DataError: If messages of an answer do not follow the prompt, or the prompts differ.
    """
    (first, chosen), (second, rejected) = (
        _without_prompt(row, side, prompt, answer)
        for side, answer in zip(SIDES, answers, strict=True)
    )
    if len(first) != len(second) or not all(map(_is_same, first, second)):
        raise DataError(
            f"{row.where}: chosen and rejected are behind different prompts; both must be behind "
            "the same messages"
        )
    return first, [chosen, rejected]


def _without_prompt(
    row: Row, side: str, prompt: list[Message], answer: list[Message]
) -> tuple[list[Message], list[Message]]:
    system, asked = _system(prompt)
    own_system, repeated = _system(answer)
    if len(repeated) > len(asked) and all(map(_is_same, asked, repeated)):
        if system and own_system and not _is_same(system[0], own_system[0]):
            raise DataError(
                f"{row.where}: prompt and {side} have different system messages; keep one of them"
            )
        end = len(asked)
        return [*(own_system or system), *repeated[:end]], repeated[end:]
    first = answer[0]["role"] if answer else ASSISTANT
    if first in SYSTEM_ROLES or first == prompt[-1]["role"] == "user":
        raise DataError(
            f"{row.where}: {side} begins with a message of the role {first!r}, which does not "
            "repeat the prompt and cannot follow it. Leave prompt out if chosen and rejected are "
            "whole conversations: their common first messages are the prompt."
        )
    return prompt, answer


def _system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system message, if there is one, and the messages behind it."""
    count = int(bool(messages) and messages[0]["role"] in SYSTEM_ROLES)
    return messages[:count], messages[count:]


def _is_same(one: Message, other: Message) -> bool:
    """Return whether two messages are equal, apart from white space around the content."""

    def compared(message: Message) -> list[Any]:
        values = [message.get(key) for key in ("role", "content", "tool_calls")]
        return [value.strip() if isinstance(value, str) else value for value in values]

    return compared(one) == compared(other)


def _behind(row: Row, prompt: Any, answer: Any) -> Chat | Text:
    fields = {**row.fields, "prompt": prompt, "completion": answer}
    answer_row = Row(
        row.where, {key: value for key, value in fields.items() if key not in _OTHER_NAMES}
    )
    parsed = cast("Chat | Text", parse_row(answer_row))
    if isinstance(parsed, Chat) and not parsed.trained:
        raise DataError(f"{row.where}: there is no answer of the assistant behind the prompt")
    return parsed
