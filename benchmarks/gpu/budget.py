"""Spend a budget: cases alone in its first half, tests side by side, and cases again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.jobs import Job, Names, Result, order, passed_here, timed
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.record import RunRecord, outcome_of
from benchmarks.outcomes import Outcome

CASES_PART = 0.5
"""Of the budget, in which cases run before the tests."""
_SAID = 6000
"""Last characters of a failure that are kept."""


@dataclass(frozen=True)
class Kept:
    """Outcomes of runs before, from which the order and the times come."""

    tests: Mapping[str, Outcome]
    cases: Mapping[str, Outcome]


@dataclass(frozen=True)
class Workers:
    """Arguments of :mod:`benchmarks.gpu.worker`."""

    tests: Sequence[str] = ("tests", "tests/gpu", "gpu")
    cases: Sequence[str] = ("cases",)
    num_tests: int = 8
    """Workers of tests, which share the GPU; with one they take 9 minutes."""


def spend(
    record: RunRecord,
    kept: Kept,
    deadline: float,
    env: Mapping[str, str],
    workers: Workers = Workers(),
) -> int:
    """Run cases and tests until the deadline; return how many failed or are missing.

    Args:
        record: Takes every outcome; those of earlier runs are in it.
        kept: Outcomes in the repository.
        deadline: Of ``time.monotonic``.
        env: Environment of the workers.
        workers: Who runs the jobs.
    """
    run = _Spending(record, kept)
    now = time.monotonic()
    pool = partial(Pool, deadline=deadline, log=record.path.with_suffix(".log"), env=env)
    cases = partial(pool, workers.cases, 1, run.finish_case)
    tests = pool(workers.tests, workers.num_tests, run.finish_test, deadline)
    left = run.through(cases(now + CASES_PART * (deadline - now)), run.cases)
    missing = run.through(tests, run.tests)
    if any(time.monotonic() + job.seconds < deadline for job in left):
        left = run.through(cases(deadline), run.cases)
    missing += left
    for job in missing:
        print(f"{job.name}: left for the next run, about {job.seconds:.0f} s", flush=True)
    return run.num_failed + len(missing)


class _Spending:
    """Chooses jobs, and records their results."""

    def __init__(self, record: RunRecord, kept: Kept) -> None:
        self.record, self.kept = record, kept
        self.num_failed = 0
        self.done: set[str] = set()

    def through(self, pool: Pool, choose: Callable[[Names], list[Job]]) -> list[Job]:
        """Run a pool; return the jobs that were left. One whose workers cannot begin costs the
        others nothing.
        """
        try:
            return pool.run(choose)
        except RuntimeError as error:
            self._finish(Job(" ".join(pool.command), 0.0), Result("failed", 0.0, str(error)))
            return []

    def tests(self, names: Names) -> list[Job]:
        """Return the tests that have not passed here, in their order."""
        for name, text in names.broken.items():
            self.finish_test(Job(name, 0.0), Result("failed", 0.0, text))
        return self._open(names.jobs, self.kept.tests, self.record.tests)

    def cases(self, names: Names) -> list[Job]:
        """Return the cases that have not passed here, in their order."""
        return self._open(names.jobs, self.kept.cases, self.record.outcomes())

    def _open(
        self,
        estimates: Mapping[str, float],
        kept: Mapping[str, Outcome],
        earlier: Mapping[str, Outcome],
    ) -> list[Job]:
        header, last = self.record.header, {**kept, **earlier}
        left = [
            name for name in estimates
            if name not in self.done and not passed_here(earlier.get(name), header)
        ]  # fmt: skip
        return timed(order(left, last), estimates, last)

    def finish_test(self, job: Job, result: Result) -> None:
        """Record a test."""
        outcome = outcome_of(result.outcome, self.record.header, result.seconds)
        self.record.add_test(job.name, outcome, result.text[-_SAID:])
        self._finish(job, result)

    def finish_case(self, job: Job, result: Result) -> None:
        """Record a case. One that hangs or dies has no numbers."""
        numbers = {"failed": result.text} if result.numbers is None else result.numbers
        self.record.add_case(job.name, numbers, result.seconds)
        self._finish(job, result)

    def _finish(self, job: Job, result: Result) -> None:
        self.done.add(job.name)
        self.num_failed += result.outcome == "failed"
        print(f"{result.outcome}: {job.name}, {result.seconds:.1f} s", flush=True)
        if result.outcome == "failed":
            print(result.text[-_SAID:], flush=True)
