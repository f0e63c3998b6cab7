"""Preludes: modules outside of the units that a forward calls before the first stage ends, such as
a vision tower and the tower's projector.

The first stage holds and runs preludes. On later stages a call returns what was received, or a
placeholder of the real shape. Unlike a unit, a prelude may be called any number of times in a
forward: not at all for a batch of text, twice for a batch of images and videos.

A unit has an index of 0 or more. A call of a prelude has a negative index, so that outputs of
preludes are traced, carried and checked like outputs of units. With 2 preludes the calls are

    -1  first call of prelude 0        -3  second call of prelude 0
    -2  first call of prelude 1        -4  second call of prelude 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_lightning.errors import PipelineError


def call_index(position: int, earlier: int, num_preludes: int) -> int:
    """Return the index of a call of the prelude at ``position``, after ``earlier`` calls."""
    return -(1 + position + earlier * num_preludes)


def position_of(index: int, num_preludes: int) -> int:
    """Return the position of the prelude of a call."""
    return (-1 - index) % num_preludes


def name_of(index: int, units: Sequence[str], preludes: Sequence[str]) -> str:
    """Return the path of the unit with an index, or of the prelude of a call."""
    return units[index] if index >= 0 else preludes[position_of(index, len(preludes))]


class PreludeCalls:
    """Calls of preludes in a forward of a stage.

    Args:
        num_preludes: Number of preludes.
        counts: Number of earlier calls by the position of the prelude.
    """

    def __init__(self, num_preludes: int, counts: Counter[int] | None = None) -> None:
        self._num_preludes = num_preludes
        self._counts: Counter[int] = Counter(counts)
        self._at_entry: Counter[int] = Counter(counts)

    def enter(self) -> None:
        """Mark the entry to the pipelined module. A step may call a prelude before."""
        self._at_entry = Counter(self._counts)

    def restarted(self) -> PreludeCalls:
        """Return the calls as of the entry, for a forward that runs again."""
        return PreludeCalls(self._num_preludes, self._at_entry)

    def next(self, position: int) -> int:
        """Count a call. Return the index of the call."""
        index = call_index(position, self._counts[position], self._num_preludes)
        self._counts[position] += 1
        return index

    def only(self, position: int) -> int:
        """Return the index of the only call of a prelude, for a recomputation.

        Raises:
            PipelineError: If there are several calls, since a recomputation knows no order.
        """
        if self._counts[position] > 1:
            raise PipelineError(
                "a tower or another module before the pipeline's units is called several times in "
                "a forward, and a checkpoint around the calls runs again in backward, where it is "
                "unknown which call is meant. Let the checkpoint begin behind the calls, or name "
                "the module in PipelineOptions(replicated_modules=[...])."
            )
        return call_index(position, 0, self._num_preludes)

    def made(self) -> set[int]:
        """Return the indices of all calls."""
        return {
            call_index(position, previous, self._num_preludes)
            for position, count in self._counts.items()
            for previous in range(count)
        }
