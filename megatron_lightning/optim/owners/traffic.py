"""Messages and memory of owners in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MIB, _GIB = 2**20, 2**30
_MAIN = 4  # bytes of an element of main params and gradients
_COPIES = 2
"""Main param and gradient."""
MESSAGE = 2**20
"""Elements of a message, for each owner: small units travel together."""


class Traffic(NamedTuple):
    """Messages and memory of a step, over all ranks of an exchange."""

    num_sent: int
    """Bytes sent between ranks in a step."""
    largest: int
    """Elements of the largest parameter or expert."""
    owned: tuple[int, ...]
    """Elements owned by each rank."""
    stack: int = 0
    """Elements of the largest stack of experts with one owner. 0: none."""

    @classmethod
    def total(cls, exchanges: Iterable[Traffic]) -> Traffic:
        """Return the sums of several exchanges."""
        several = list(exchanges)
        num_ranks = max((len(each.owned) for each in several), default=0)
        padded = [(*each.owned, *(0,) * (num_ranks - len(each.owned))) for each in several]
        return cls(
            sum(each.num_sent for each in several),
            max((each.largest for each in several), default=0),
            tuple(map(sum, zip(*padded, strict=True))),
            max((each.stack for each in several), default=0),
        )

    @property
    def peak_bytes(self) -> int:
        """Bytes of full tensors on the fullest rank in a step, without the optimizer's state: what
        it owns, a message received and one sent.
        """
        fullest = max(self.owned, default=0)
        return _MAIN * (_COPIES * fullest + 2 * min(fullest, max(self.largest, MESSAGE)))


def describe_owners(classes: Sequence[str], traffic: Traffic, *, at_most: bool = False) -> str:
    """Return a sentence for the start of a fit.

    Args:
        classes: The optimizers.
        traffic: What a step sends and keeps.
        at_most: Whether a step may send less, as in a plan, which does not know what owners hold.
    """
    mean = sum(traffic.owned) / max(1, len(traffic.owned))
    fullest = max(traffic.owned, default=0)
    ratio = f"{fullest / mean:.2f} x the mean" if mean else "nothing"
    return (
        f"{', '.join(classes)} reads full tensors, so one of {len(traffic.owned)} ranks owns and "
        f"steps each. A step sends {'at most ' * at_most}{_size(traffic.num_sent)} between them. "
        f"The fullest rank owns {fullest:,} elements ({ratio}; the largest tensor has "
        f"{traffic.largest:,}), and holds {_size(traffic.peak_bytes)} of full tensors at its "
        "peak, beside the state."
    )


def describe_stack(classes: Sequence[str], traffic: Traffic) -> str:
    """Return a warning for stacks of experts with one owner.

    Args:
        classes: The optimizers.
        traffic: What a step sends and keeps.
    """
    return (
        f"{', '.join(classes)} steps the stacked experts of a layer as one tensor, so one rank "
        f"owns up to {_size(traffic.stack * _MAIN)} of experts in one piece, beside the "
        "state, which expert parallelism does not divide. Use an optimizer that steps each matrix "
        "alone, such as Muon, for the experts: ChainedOptimizer(Muon(experts), ...)."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes < _GIB else f"{num_bytes / _GIB:,.1f} GiB"
