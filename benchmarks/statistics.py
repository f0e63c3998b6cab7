"""Ratios of medians of paired measurements, with a bootstrap interval (Efron,
https://doi.org/10.1214/aos/1176344552).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95
TOLERANCE = 0.05
"""A goal is met if the interval's lower end is at most this much below it."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of the medians of two series that were measured in turn."""

    value: float
    low: float
    high: float
    """Ends of the interval."""

    def scaled(self, factor: float) -> Ratio:
        """Return the ratio times a constant."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def meets(self, goal: float) -> bool:
        """Return whether the whole interval is at least the goal, within the tolerance."""
        return self.low >= goal - TOLERANCE

    def keeps(self, limit: float) -> bool:
        """Return whether the whole interval is at most the limit."""
        return self.high <= limit

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def verdict(is_met: bool) -> str:
    """Return a goal in words."""
    return "met" if is_met else "missed"


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0
) -> Ratio:
    """Return the ratio of the medians; pairs are resampled together, since noise of the machine
    affects both of a round.

    Args:
        numerator: One number a round.
        denominator: The peer's number of the same rounds.
        seed: Seed of the resampling.

    Raises:
        ValueError: If the series are empty or differ in length.
    """
    if not numerator or len(numerator) != len(denominator):
        raise ValueError(
            f"{len(numerator)} and {len(denominator)} measurements are no pairs; measure both in "
            "every round."
        )
    pairs = np.array([numerator, denominator])
    picks = np.random.default_rng(seed).integers(0, pairs.shape[1], (NUM_RESAMPLES, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(medians[0] / medians[1], (tail, 1.0 - tail))
    value = np.median(pairs[0]) / np.median(pairs[1])
    return Ratio(float(value), float(low), float(high))
