"""A shell script divided into statements and words, as far as scripts of training use the shell.

Words keep their quotes and variables. ``&&`` and ``||`` are words of a statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_lightning.errors import ConfigError

_BLANKS, _ENDS = " \t\r", "\n;|&"
_CLOSING: Mapping[str, str] = {"$(": ")", "${": "}"}


class Statement(NamedTuple):
    """A command, an assignment, or a part of an ``if``."""

    line: int
    """Number of its first line."""
    words: tuple[str, ...]
    """Words as written."""


class ShellError(ConfigError):
    """A line that is not understood."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}")


def statements(script: str) -> Iterator[Statement]:
    """Yield the statements of a script."""
    position, line, first, words = 0, 1, 1, list[str]()
    while position < len(script):
        char = script[position]
        if script.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif char in _BLANKS:
            position += 1
        elif char == "#":
            position = _end_of_line(script, position)
        elif script[position : position + 2] in ("&&", "||"):
            words.append(script[position : position + 2])
            position += 2
        elif char in _ENDS:
            if words:
                yield Statement(first, tuple(words))
            words = []
            position, line = position + 1, line + (char == "\n")
        else:
            end = end_of(script, position, line=line)
            first = first if words else line
            words.append(script[position:end])
            position, line = end, line + script.count("\n", position, end)
    if words:
        yield Statement(first, tuple(words))


def words_of(text: str, line: int) -> list[str]:
    """Return the words of an array's inside."""
    return [word for statement in statements(text) for word in statement.words]


def end_of(text: str, position: int, closing: str = "", *, line: int) -> int:
    """Return the position behind the word at ``position``, or behind ``closing``.

    Args:
        text: The script, or a word.
        position: Where to begin.
        closing: Closing bracket or quote. "": a word ends at a blank.
        line: Number of the line, for errors.
    """
    quoted = closing == '"'
    while position < len(text):
        char = text[position]
        if closing and char == closing:
            return position + 1
        if not closing and char in _BLANKS + _ENDS:
            return position
        if char == "\\":
            position += 2
        elif char == "'" and not quoted:
            position = text.find("'", position + 1) + 1
            if position == 0:
                raise ShellError(line, "a quote ' is not closed.")
        elif char == '"':
            position = end_of(text, position + 1, '"', line=line)
        elif text[position : position + 2] in _CLOSING:
            inner = _CLOSING[text[position : position + 2]]
            position = end_of(text, position + 2, inner, line=line)
        elif char == "(" and not quoted:
            position = end_of(text, position + 1, ")", line=line)
        elif char == "#" and closing == ")" and text[position - 1].isspace():
            position = _end_of_line(text, position)
        else:
            position += 1
    if closing:
        raise ShellError(line, f"{closing} is missing.")
    return len(text)


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end
