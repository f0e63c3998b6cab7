"""Tests and cases of a budgeted run, in the order in which they are worth most."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.outcomes import Outcome

HANG_S = 120.0
"""Least time after which a job without a time limit of its own is taken to hang: first runs load
kernels, and compile."""
_LONGER = 1.6
"""Times its estimate, after which it is taken to hang."""
_GRACE_S = 15.0
"""Beyond a time limit of its own, in which a job reports it."""
_TAKES_TURNS = "test_several_ranks.py"
"""File of tests whose ranks share the GPU: beside each other they would run out of memory and of
time."""
TEST_S = 6.0
"""Estimate of a test where no test of the same file has run."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0}


@dataclass(frozen=True)
class Job:
    """A test or a case."""

    name: str
    """A test below its folder, with its parameters in brackets; or ``case/item``."""
    seconds: float
    """Measured when it last ran, or estimated."""
    own_limit_s: float = 0.0
    """Seconds after which it ends itself; 0: it has no limit."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it is taken to hang."""
        if self.own_limit_s:
            return self.own_limit_s + _GRACE_S
        return max(HANG_S, _LONGER * self.seconds)

    @property
    def takes_turns(self) -> bool:
        """One such job runs at a time."""
        return _file(self.name) == _TAKES_TURNS


class Names(NamedTuple):
    """Jobs that a worker can run."""

    jobs: Mapping[str, float]
    """Name -> estimated seconds; 0: unknown."""
    broken: dict[str, str]
    """Files that cannot be imported, with their errors."""
    limits_s: Mapping[str, float]
    """Name -> seconds after which the job ends itself."""


class Result(NamedTuple):
    """How a job ended."""

    outcome: str
    """passed, failed or skipped."""
    seconds: float
    text: str = ""
    """Error of a failure, or the reason of a skip."""
    numbers: Mapping[str, Any] | None = None
    """Of a case."""


def seconds(text: str) -> float:
    """Return the seconds of ``8m``, ``90s`` or ``90``.

    Raises:
        ValueError: If the text is no positive time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no positive time. Set one such as 8m or 450s.")
    return float(found[1]) * _UNITS[found[2]]


def order(names: Iterable[str], last: Mapping[str, Outcome]) -> list[str]:
    """Sort by worth: never ran, failed when it last ran, passed the longest ago. Names of the same
    worth stay in their order.
    """

    def worth(name: str) -> tuple[int, str]:
        outcome = last.get(name)
        if outcome is None or outcome.outcome == "skipped":
            return 0, ""
        return (1, "") if outcome.outcome == "failed" else (2, outcome.date)

    return sorted(names, key=worth)


def passed_here(outcome: Outcome | None, header: Mapping[str, object]) -> bool:
    """Return whether a test or case passed on this commit and GPU."""
    here = (header["commit"] or "", header["gpu"] or "")
    return (
        outcome is not None
        and outcome.outcome == "passed"
        and (outcome.commit, outcome.gpu) == here
    )


def timed(names: Sequence[str], found: Names, last: Mapping[str, Outcome]) -> list[Job]:
    """Return jobs with measured seconds, given estimates, or the median of the same file."""
    measured: dict[str, list[float]] = {}
    for name, outcome in last.items():
        if outcome.seconds:
            measured.setdefault(_file(name), []).append(outcome.seconds)

    def seconds_of(name: str) -> float:
        before = last[name].seconds if name in last else 0.0
        return before or found.jobs[name] or statistics.median(measured.get(_file(name), [TEST_S]))

    return [Job(name, seconds_of(name), found.limits_s.get(name, 0.0)) for name in names]


def _file(name: str) -> str:
    return name.partition("::")[0]
