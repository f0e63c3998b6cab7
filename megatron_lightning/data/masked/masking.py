"""Choice of masked tokens: n-grams of words in random order, by the draws of Megatron's
``MaskedWordPieceDataset`` (``core/datasets/masked_dataset.py``).

Lengths of n-grams follow 1 / n (BERT), or a geometric distribution (SpanBERT,
https://arxiv.org/abs/1907.10529, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

_SPAN_PROBABILITY = 0.2  # of SpanBERT's geometric distribution


@dataclass(frozen=True)
class MaskingOptions:
    """Options of the choice, by Megatron's names."""

    masking_probability: float
    masking_max_ngram: int
    masking_do_full_word: bool
    masking_do_permutation: bool
    masking_use_longer_ngrams: bool
    masking_use_geometric_distribution: bool

    @property
    def ngram_sums(self) -> npt.NDArray[np.float64]:
        """Cumulative probabilities of the lengths of n-grams."""
        weights = 1.0 / (np.arange(self.masking_max_ngram, dtype=np.int64) + 1)
        weights = weights / weights.sum(keepdims=True)
        if self.masking_use_longer_ngrams:
            weights = weights[::-1]
        weights = weights / weights.sum(keepdims=True)
        sums: npt.NDArray[np.float64] = weights.cumsum()
        sums /= sums[-1]
        return sums


@dataclass(frozen=True)
class Unmasked:
    """A sequence before masking."""

    tokens: Sequence[int]
    words: Sequence[Sequence[int]]
    """Positions of each word."""
    target_length: int
    """Target length of the sample."""


@dataclass
class Masked:
    """A sequence with masked tokens."""

    tokens: list[int]
    labels: dict[int, int] = field(default_factory=dict)
    """Position -> original token, of all changed or chosen positions."""
    spans: list[list[int]] = field(default_factory=list)
    """Positions of each chosen n-gram, in the order of the sequence."""


def mask_tokens(
    sequence: Unmasked,
    options: MaskingOptions,
    random: np.random.RandomState,
    replacement: Callable[[np.random.RandomState], int | None],
    has_room: Callable[[int, int], bool] = lambda num_spans, num_tokens: True,
) -> Masked:
    """Return the sequence with masked tokens.

    Args:
        sequence: The sequence.
        options: Options of the choice.
        random: The sample's draws.
        replacement: Draws the token in the place of a masked token. None: the token stays.
        has_room: Whether numbers of spans and of masked tokens fit. Masking ends if not.
    """
    tokens, words = sequence.tokens, sequence.words
    limit = min(
        options.masking_probability * sequence.target_length,
        max(1, round(len(tokens) * options.masking_probability)),
    )
    sums = options.ngram_sums
    masked = Masked(list(tokens))
    order = np.arange(len(words))
    random.shuffle(order)
    for word in order.tolist():
        if len(masked.labels) >= limit:
            break
        length = _drawn_length(random, sums, options)
        positions = _fitting(words, word, length, limit - len(masked.labels))
        # Words longer than the remaining number, and words masked already, are passed over.
        if positions is None or any(position in masked.labels for position in positions):
            continue
        if not has_room(len(masked.spans) + 1, len(masked.labels) + len(positions)):
            break
        for position in positions:
            drawn = replacement(random)
            masked.labels[position] = tokens[position]
            masked.tokens[position] = tokens[position] if drawn is None else drawn
        masked.spans.append(positions)
    masked.spans.sort(key=lambda positions: positions[0])
    if options.masking_do_permutation:
        _permute(masked, words, limit, options, random)
    return masked


def _drawn_length(
    random: np.random.RandomState, sums: npt.NDArray[np.float64], options: MaskingOptions
) -> int:
    if options.masking_use_geometric_distribution:
        return min(int(random.geometric(_SPAN_PROBABILITY)), options.masking_max_ngram)
    return _drawn_by_sums(random, sums)


def _drawn_by_sums(random: np.random.RandomState, sums: npt.NDArray[np.float64]) -> int:
    """Draw a length as ``RandomState.choice`` does."""
    return int(sums.searchsorted(random.random_sample(), side="right")) + 1


def _fitting(
    words: Sequence[Sequence[int]], word: int, length: int, room: float
) -> list[int] | None:
    """Return the positions of the longest n-gram from a word that fits, of ``length`` words at
    most. None: the word alone is too long.
    """
    for size in range(length, 0, -1):
        positions = list(chain.from_iterable(words[word : word + size]))
        if len(positions) <= room:
            return positions
    return None


def _permute(
    masked: Masked,
    words: Sequence[Sequence[int]],
    limit: float,
    options: MaskingOptions,
    random: np.random.RandomState,
) -> None:
    """Permute the tokens of as many further positions, in place. Megatron draws the lengths from
    NumPy's global state: here they follow from the sample too.
    """
    chosen: set[int] = set()
    sums, order = options.ngram_sums, np.arange(len(words))
    random.shuffle(order)
    for word in order.tolist():
        if len(chosen) >= limit:
            break
        positions = _fitting(words, word, _drawn_by_sums(random, sums), limit - len(chosen))
        if positions is None or any(p in masked.labels or p in chosen for p in positions):
            continue
        chosen.update(positions)
    places = sorted(chosen)
    sources = list(places)
    random.shuffle(sources)
    # Sources are read before any place is written.
    original = list(masked.tokens)
    for place, source in zip(places, sources, strict=True):
        masked.tokens[place] = original[source]
        masked.labels[place] = original[place]
