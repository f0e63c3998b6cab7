"""Fields of a conversation beside plain content: dropped by name, or marked to see whether and
where a chat template writes them.

A template reads the keys it knows and passes over every other key without an error. A mark is a
private character around a value. A rendering of the marked messages shows the values that the
template writes, and their characters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lightning.data.chat.conversations import REASONING, THOUGHT, Chat
from megatron_lightning.data.chat.row_values import SYSTEM_ROLES
from megatron_lightning.errors import DataError

DROPPABLE = ("tools", "functions", "system", "tool_calls", "function_call", "refusal", *REASONING)
"""Fields that ``drop_fields`` may name."""
_PLAIN = ("role", "content", "name", "id")
"""Keys of a message without text of an answer."""
_KNOWN = ("content", "tool_calls", "function_call", *REASONING)
"""Keys of an answer that have marks, or are looked for in the text."""
_FIRST_BEGIN, _FIRST_END = 0xF0000, 0x100000  # planes 15 and 16, of private use
_END_OF_THOUGHT = "</think>"

Message = Mapping[str, Any]


def drop(chat: Chat, names: Collection[str]) -> tuple[Chat, list[str]]:
    """Return a conversation without the fields in ``names``, and the fields that it had.

    Raises:
        DataError: If nothing of a trained answer remains.
    """
    dropped = {name for name in ("tools", "functions") if name in names and getattr(chat, name)}
    kept: list[Message] = []
    trained = set()
    for index, message in enumerate(chat.messages):
        if message["role"] in SYSTEM_ROLES and "system" in names:
            dropped.add("system")
            continue
        fields = {key: value for key, value in message.items() if key not in names}
        if index in chat.trained:
            check_remains(chat.where, index, message, fields)
            trained.add(len(kept))
        dropped |= {key for key in message.keys() - fields.keys() if message[key]}
        kept.append(fields)
    without = Chat(
        chat.where,
        kept,
        None if "tools" in names else chat.tools,
        frozenset(trained),
        chat.options,
        None if "functions" in names else chat.functions,
        chat.nulls,
        chat.images,
        chat.num_unplaced,
        chat.placeholder,
    )
    return without, sorted(dropped)


def check_remains(where: str, index: int, before: Message, after: Message) -> None:
    """Refuse an answer of which only removed fields had text.

    Raises:
        DataError: If an answer is empty, and was not.
    """
    if _texts(before) and not _texts(after):
        gone = [key for key in before if key not in after] or ["reasoning"]
        raise DataError(
            f"{where}: message {index} is empty without {', '.join(gone)}, and an empty answer "
            "would be trained. Give the message weight 0, or leave the row out."
        )


def _texts(message: Message) -> list[str]:
    """Return the keys of a message with text of an answer."""
    content = ["content"] if str(message.get("content") or "").strip() else []
    return content + [key for key, value in message.items() if key not in _PLAIN and value]


def inlined(message: Message) -> dict[str, Any]:
    """Return a message with the reasoning inside of the content."""
    fields = {key: value for key, value in message.items() if key not in REASONING}
    thought = next((str(message[key]) for key in REASONING if message.get(key)), "").strip()
    if thought:
        fields["content"] = f"<think>\n{thought}\n</think>\n\n{fields['content']}"
    return fields


def without_reasoning(message: Message) -> dict[str, Any]:
    """Return a message without reasoning, beside the content and inside of it."""
    fields = {key: value for key, value in message.items() if key not in REASONING}
    return {**fields, "content": THOUGHT.sub("", fields["content"])}


@dataclass(frozen=True)
class Mark:
    """A marked value."""

    message: int
    key: str
    begin: str
    end: str
    part: int = 0
    """Number of a call in the message."""

    def __str__(self) -> str:
        what = {
            "tool_calls": "the tool calls",
            "content": "the reasoning in the content",
            **{role: f"the {role} text" for role in SYSTEM_ROLES},
        }
        return f"{what.get(self.key, self.key)} of message {self.message}"

    @property
    def is_reasoning(self) -> bool:
        """Whether the value is the reasoning of an answer."""
        return self.key in (*REASONING, "content")

    @property
    def field(self) -> str:
        """Name of the value for ``drop_fields``."""
        return "system" if self.key in SYSTEM_ROLES else self.key

    def removed(self, message: Message) -> list[Message]:
        """Return the message without the value, or no message."""
        if self.field == "system":
            return []
        if self.key == "content":
            return [without_reasoning(message)]
        fields = {key: value for key, value in message.items() if key != self.field}
        if self.key == "tool_calls" and len(calls := message["tool_calls"]) > 1:
            fields["tool_calls"] = [*calls[: self.part], *calls[self.part + 1 :]]
        return [fields]


class MarkedMessages:
    """Messages with a mark around every value that a template may leave out.

    Marked are system messages, calls of tools, and in ``answers`` the reasoning, alone or inside of
    the content. An answer without any of these and without content has marks around other texts.

    Args:
        messages: The messages.
        answers: Trained answers. Templates leave the reasoning of other answers out by design.
    """

    def __init__(self, messages: Sequence[Message], answers: Collection[int]) -> None:
        self.marks: list[Mark] = []
        """All marks, in order."""
        self.messages = [
            self._marked(index, message, index in answers) for index, message in enumerate(messages)
        ]

    def __bool__(self) -> bool:
        return bool(self.marks)

    def unwritten(self, text: str) -> list[Mark]:
        """Return the marks missing from ``text``, a rendering of the marked messages."""
        return [mark for mark in self.marks if mark.end not in text]

    def reasoning(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return ``text`` without marks, and the characters of reasoning in the result."""
        thoughts = [mark for mark in self.marks if mark.is_reasoning]
        marks = {one for mark in self.marks for one in (mark.begin, mark.end)}
        plain, places, last = [], {}, 0
        for number, place in enumerate(at for at, one in enumerate(text) if one in marks):
            plain.append(text[last:place])
            last = place + 1
            places[text[place]] = place - number
        spans = [
            (places[one.begin], places[one.end])
            for one in thoughts
            if one.begin in places and one.end in places
        ]
        return "".join([*plain, text[last:]]), spans

    def _marked(self, index: int, message: Message, is_trained: bool) -> Message:
        fields = dict(message)
        if message["role"] in SYSTEM_ROLES:
            fields["content"] = self._mark(index, message["role"], message["content"])
        if fields.get("tool_calls"):
            calls = enumerate(fields["tool_calls"])
            fields["tool_calls"] = [self._marked_call(index, part, one) for part, one in calls]
        if isinstance(call := fields.get("function_call"), Mapping):
            name = self._mark(index, "function_call", call.get("name"))
            fields["function_call"] = {**call, "name": name}
        return self._marked_answer(index, fields) if is_trained else fields

    def _marked_answer(self, index: int, fields: dict[str, Any]) -> Message:
        thoughts: dict[str, Any] = {}
        for key in REASONING:
            if isinstance(thought := fields.get(key), str):
                # Servers write one thought under two names.
                if thought not in thoughts:
                    thoughts[thought] = self._mark(index, key, thought)
                fields[key] = thoughts[thought]
        # A generation prompt may have opened the thought.
        before, tag, behind = fields["content"].partition(_END_OF_THOUGHT)
        if tag:
            opened, begin, thought = before.rpartition("<think>")
            fields["content"] = (
                opened + begin + self._mark(index, "content", thought) + tag + behind
            )
        if not any(fields.get(key) for key in _KNOWN):
            fields |= {key: self._mark(index, key, fields[key]) for key in _texts(fields)}
        return fields

    def _marked_call(self, index: int, part: int, call: Message) -> Message:
        function = call.get("function", call)
        name = self._mark(index, "tool_calls", function.get("name"), part)
        function = {**function, "name": name}
        return {**call, "function": function} if "function" in call else function

    def _mark(self, index: int, key: str, text: Any, part: int = 0) -> Any:
        """Return ``text`` with a mark. White space stays outside, since templates strip it."""
        if not isinstance(text, str) or not (core := text.strip()):
            return text
        number = len(self.marks)
        mark = Mark(index, key, chr(_FIRST_BEGIN + number), chr(_FIRST_END + number), part)
        self.marks.append(mark)
        return text.replace(core, f"{mark.begin}{core}{mark.end}", 1)
