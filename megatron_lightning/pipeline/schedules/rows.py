"""A pp rank's row of a schedule as a sequence of words (stage and kind). Micro-batches follow by
counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_lightning.pipeline.schedules.actions import Action, Kind

Word = tuple[int, Kind]
"""Stage and kind of work, on the stage's next micro-batch."""


def count_microbatches(words: Iterable[Word], num_microbatches: int) -> tuple[Action, ...]:
    """Number the n-th appearance of each word as micro-batch n. Drop words beyond the last
    micro-batch.

    A schedule is thus written once, for as many micro-batches as fill the pipeline, and is right
    for fewer.
    """
    counts: Counter[Word] = Counter()
    actions = []
    for word in words:
        microbatch, counts[word] = counts[word], counts[word] + 1
        if microbatch < num_microbatches:
            actions.append(Action(*word, microbatch))
    return tuple(actions)
