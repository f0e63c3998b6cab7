"""A coordinate's row of a schedule as a sequence of words (stage and kind), whose micro-batches follow by counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_lightning.pipeline.actions import Action, Kind

Word = tuple[int, Kind]
"""What a stage does next, with its next micro-batch."""


def count_microbatches(words: Iterable[Word], num_microbatches: int) -> tuple[Action, ...]:
    """Give the n-th appearance of each word micro-batch n; words beyond the last micro-batch are left out.

    So a schedule is written once, for as many micro-batches as fill the pipeline, and holds for fewer.
    """
    seen: Counter[Word] = Counter()
    actions = []
    for word in words:
        microbatch, seen[word] = seen[word], seen[word] + 1
        if microbatch < num_microbatches:
            actions.append(Action(*word, microbatch))
    return tuple(actions)
