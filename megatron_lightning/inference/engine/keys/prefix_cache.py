"""Keys of ended texts, kept for requests that begin with the same tokens.

An ended text keeps its slots until other texts need them. The text with the most common tokens is
found by hashes over blocks of token ids, each of a block and all blocks before, and the ids are
compared before any key is shared. Under memory pressure texts go in the order of their last use.

Keys belong to one set of weights and adapters: the scheduler, and so the kept texts, live inside
``Engine.active()``, and a change of weights in that block calls ``Scheduler.restart()``. States
of layers cannot be cut at an earlier token: models with such layers keep no texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.inference.engine.keys.key_slots import Allocator, Beginning
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, Request

BLOCK = 16
"""Tokens of a block. Shorter common beginnings are computed again."""


@dataclass
class PrefixCounts:
    """Number of tokens of prompts that were looked up, and of those whose keys were kept."""

    tokens: int = 0
    reused: int = 0

    @property
    def share(self) -> float:
        """Reused share of the tokens. 0 without tokens."""
        return self.reused / max(self.tokens, 1)

    def add(self, tokens: int, reused: int) -> None:
        """Count the tokens of texts."""
        self.tokens += tokens
        self.reused += reused

    def __str__(self) -> str:
        return f"{self.share:.1%} of {self.tokens:,} prompt tokens reused"


@dataclass(frozen=True, eq=False)
class KeptText:
    """An ended text with keys."""

    tokens: Sequence[int]
    """Tokens with keys."""
    hashes: Sequence[int]
    """Of each block and the blocks before."""
    is_long: bool
    """Whether the keys are those of a long text (LongRoPE)."""


class PrefixCache:
    """Kept texts, and the allocator with their slots. Every rank of a replica keeps the same texts.

    Args:
        allocator: The slots.
        is_enabled: Whether texts are kept. False if layers carry states.
        num_drafts: Tokens behind a token that its keys depend on.
        counts: Counts the tokens of prompts.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        is_enabled: bool,
        num_drafts: int = 0,
        counts: PrefixCounts | None = None,
    ) -> None:
        self._allocator = allocator
        self._is_enabled = is_enabled
        self._num_drafts = num_drafts
        self._counts = counts or PrefixCounts()
        self._texts: dict[KeptText, None] = {}
        """In the order of their last use."""
        self._by_hash: dict[int, dict[KeptText, None]] = {}

    def find(self, request: Request) -> Beginning | None:
        """Return the most first keys of a request that a text has."""
        # The last token is computed by every request, for the logits of the next token.
        most = request.num_inputs - max(1, request.num_scored, self._num_drafts)
        if not self._texts or request.offset or most < BLOCK:
            return None
        text, common = self._longest(request.tokens[: request.num_inputs], is_long=request.is_long)
        count = min(common - self._num_drafts, most)
        if text is None or count < BLOCK:
            return None
        self._texts[text] = self._texts.pop(text)
        return Beginning(text, count)

    def reserve(self, request: Request, length: int, beginning: Beginning | None = None) -> bool:
        """Reserve slots for ``length`` tokens. Return whether there were enough slots.

        Texts that were not used for the longest time give theirs, but never the source of the
        beginning. None is dropped if all of them were too few.
        """
        wanted = (request, length, request.at_most, beginning)
        if self._allocator.reserve(*wanted):
            return True
        texts = [t for t in self._texts if beginning is None or t is not beginning.source]
        if self._allocator.missing(*wanted) > self._allocator.largest(texts):
            return False
        for text in texts:
            self._drop(text)
            if self._allocator.reserve(*wanted):
                return True
        return False

    def count(self, request: Request, num_reused: int) -> None:
        """Count the tokens of a request at its first start."""
        if self._is_enabled and not request.has_started:
            self._counts.add(request.num_inputs, num_reused)

    def keep(self, request: Request) -> None:
        """Keep the slots of an ended request, or give them back."""
        count = min(request.done, len(request.tokens))
        can_keep = self._is_enabled and not request.offset and count >= BLOCK
        if not can_keep or request.reason in (NOT_FINITE, "abort"):
            self._allocator.release(request)
            return
        tokens = tuple(request.tokens[:count])
        known, common = self._longest(tokens, is_long=request.is_long)
        if known is not None and count - common < BLOCK:
            self._allocator.release(request)
            self._texts[known] = self._texts.pop(known)
            return
        if known is not None and common == len(known.tokens):
            self._drop(known)  # the beginning of this text: a chat's turn before
        text = KeptText(tokens, _hashes(tokens), request.is_long)
        self._allocator.hand_over(request, text, count)
        self._texts[text] = None
        for number in text.hashes:
            self._by_hash.setdefault(number, {})[text] = None

    def forget(self) -> None:
        """Drop all texts: keys of new weights are others."""
        for text in tuple(self._texts):
            self._drop(text)

    def _drop(self, text: KeptText) -> None:
        """Give the slots of a text back."""
        del self._texts[text]
        self._allocator.release(text)
        for number in text.hashes:
            texts = self._by_hash[number]
            del texts[text]
            if not texts:
                del self._by_hash[number]

    def _longest(self, tokens: Sequence[int], *, is_long: bool) -> tuple[KeptText | None, int]:
        """Return the text with the most first tokens in common, and their number."""
        found: KeptText | None = None
        for number in _hashes(tokens):
            # The latest text: it is the least likely to go.
            candidates = reversed(self._by_hash.get(number, {}))
            text = next((each for each in candidates if each.is_long == is_long), None)
            if text is None:
                break
            found = text
        return found, 0 if found is None else _num_common(found.tokens, tokens)


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Return the hash of each full block with all blocks before. Hashes of integers are the same in
    every process.
    """
    hashes, number = list[int](), 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, *tokens[start : start + BLOCK]))
        hashes.append(number)
    return hashes


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal first tokens."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
