"""Text of new tokens behind a prompt, and the place of stop strings.

The text of a token depends on the tokens before: tokenizers of the Llama 2 kind drop the first
space of a text, and a token may be a part of a character. New tokens are therefore decoded behind
the last tokens of the prompt.

Two forms of a text: *visible*, without special tokens, and *spelled*, with the names of special
tokens. Stop strings are searched in the spelled text, since a stop string may name a special token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

_CONTEXT = 4
"""Tokens of the prompt that new tokens are decoded behind, at least."""
UNFINISHED = "\ufffd"
"""Text of the first bytes of a character."""


class SpellingDecode(Protocol):
    """Returns the text of token ids, in both forms."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids. ``special``: with the names of special tokens."""
        ...


class ByteTest(Protocol):
    """Vocabulary with bytes as tokens."""

    def is_byte(self, token: int) -> bool:
        """Return whether a token is a byte of byte fallback."""
        ...


def text_behind(
    decode: SpellingDecode, prompt: Sequence[int], new: Sequence[int], *, special: bool = False
) -> str:
    """Return the text of ``new`` ids behind the ids of a prompt.

    The text is what the whole sequence has more than the prompt.
    """
    size = _CONTEXT
    context, before = list(prompt[-size:]), decode(prompt[-size:])
    # A context of special tokens has no text, and a context may begin inside of a character.
    while size < len(prompt) and (not before or before.startswith(UNFINISHED)):
        size *= 2
        context, before = list(prompt[-size:]), decode(prompt[-size:])
    if special:
        context = context if before else []
        before = decode(context, special=True)
    text = decode([*context, *new], special=special)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    # New tokens may complete the last character of the prompt.
    return text[len(list(same)) :]


def final_text(
    decode: SpellingDecode, prompt: Sequence[int], new: Sequence[int], stop: Sequence[str]
) -> str:
    """Return the visible text of an ended continuation, up to the first stop string."""
    spelled = text_behind(decode, prompt, new, special=True)
    return _visible(decode, prompt, new, spelled, end_of(spelled, stop))


def text_so_far(
    decode: SpellingDecode,
    vocabulary: ByteTest,
    prompt: Sequence[int],
    new: Sequence[int],
    stop: Sequence[str],
) -> str:
    """Return the part of an unfinished continuation's visible text that further tokens cannot
    change: without a run of bytes, half of a character, or the possible begin of a stop string.
    """
    count = len(new)
    # The text of a run of bytes depends on the whole run.
    while count and vocabulary.is_byte(new[count - 1]):
        count -= 1
    new = new[:count]
    spelled = text_behind(decode, prompt, new, special=True)
    text = spelled[: end_of(spelled, stop)].rstrip(UNFINISHED)
    held_lengths = (
        length
        for stop_text in stop
        for length in range(1, min(len(stop_text), len(text) + 1))
        if text.endswith(stop_text[:length])
    )
    return _visible(decode, prompt, new, spelled, len(text) - max(held_lengths, default=0))


def end_of(text: str, stop: Sequence[str], start: int = 0) -> int:
    """Return the start of the first stop string behind ``start``. Without a stop string return the
    text's length.
    """
    places = (place for stop_text in stop if (place := text.find(stop_text, start)) >= 0)
    return min(places, default=len(text))


def _visible(
    decode: SpellingDecode, prompt: Sequence[int], new: Sequence[int], spelled: str, place: int
) -> str:
    """Return the visible text of the first ``place`` characters of the spelled text."""
    visible = text_behind(decode, prompt, new)
    if place == len(spelled) or visible == spelled:
        return visible[:place] if visible == spelled else visible

    def length(count: int, *, special: bool) -> int:
        return len(text_behind(decode, prompt, new[:count], special=special))

    # The special tokens before the place have no visible text.
    counts = range(len(new) + 1)
    count = bisect_right(counts, place, key=lambda n: length(n, special=True)) - 1
    rest = place - length(count, special=True)
    if count == len(new):
        return visible
    return text_behind(decode, prompt, new[: count + 1])[: length(count, special=False) + rest]
