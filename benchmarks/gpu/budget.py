"""Spend a budget: cases alone in its first half, tests side by side, and cases again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu.jobs import Job, Names, Result, order, passed_here, timed
from benchmarks.gpu.pool import NoWorkerError, Pool
from benchmarks.gpu.record import RunRecord, outcome_of
from benchmarks.outcomes import Outcome

CASES_PART = 0.5
"""Of the budget, in which cases run before the tests."""
_OVERTIME_S = 30.0
"""Of the cases that run when the first half ends; then they are cut."""
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
    tests_env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of tests."""
    cases_env: Mapping[str, str] = field(default_factory=dict)
    """Likewise of cases. Settings of ranks that share a GPU would change their speeds."""


def spend(
    record: RunRecord,
    kept: Kept,
    deadline: float,
    workers: Workers = Workers(),
) -> int:
    """Run cases and tests until the deadline; return how many failed or are missing.

    Args:
        record: Takes every outcome; those of earlier runs are in it.
        kept: Outcomes in the repository.
        deadline: Of ``time.monotonic``.
        workers: Who runs the jobs.
    """
    run = _Spending(record, kept)
    now = time.monotonic()
    until = now + CASES_PART * (deadline - now)
    pool = partial(Pool, log=record.path.with_suffix(".log"))
    cases = partial(pool, workers.cases, 1, run.finish_case, env=workers.cases_env)
    tests = pool(
        workers.tests, workers.num_tests, run.finish_test, env=workers.tests_env,
        until=deadline, deadline=deadline,
    )  # fmt: skip
    first = cases(until=until, deadline=min(until + _OVERTIME_S, deadline))
    left = run.through(first, run.cases)
    missing = run.through(tests, run.tests)
    if any(time.monotonic() + job.seconds < deadline for job in left):
        left = run.through(cases(until=deadline, deadline=deadline), run.cases)
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
        except NoWorkerError as error:
            self._say(Job(" ".join(pool.command), 0.0), Result("failed", 0.0, str(error)))
            return error.left

    def tests(self, names: Names) -> list[Job]:
        """Return the tests that have not passed here, in their order."""
        for name, text in names.broken.items():
            self.finish_test(Job(name, 0.0), Result("failed", 0.0, text))
        return self._open(names, self.kept.tests, self.record.tests)

    def cases(self, names: Names) -> list[Job]:
        """Return the cases that have not passed here, in their order."""
        return self._open(names, self.kept.cases, self.record.outcomes())

    def _open(
        self, names: Names, kept: Mapping[str, Outcome], earlier: Mapping[str, Outcome]
    ) -> list[Job]:
        header, last = self.record.header, {**kept, **earlier}
        left = [
            name for name in names.jobs
            if name not in self.done and not passed_here(earlier.get(name), header)
        ]  # fmt: skip
        return timed(order(left, last), names, last)

    def finish_test(self, job: Job, result: Result) -> None:
        """Record a test."""
        self._finish(job, result, self._add_test)

    def finish_case(self, job: Job, result: Result) -> None:
        """Record a case."""
        self._finish(job, result, self._add_case)

    def _add_test(self, job: Job, result: Result) -> None:
        outcome = outcome_of(result.outcome, self.record.header, result.seconds)
        self.record.add_test(job.name, outcome, result.text[-_SAID:])

    def _add_case(self, job: Job, result: Result) -> None:
        """Add the numbers; a case that hangs or dies has none."""
        numbers = {"failed": result.text} if result.numbers is None else result.numbers
        self.record.add_case(job.name, numbers, result.seconds)

    def _finish(self, job: Job, result: Result, add: Callable[[Job, Result], None]) -> None:
        self.done.add(job.name)
        try:
            add(job, result)
        except Exception as error:  # one result that cannot be kept must not cost the others
            text = f"the result cannot be recorded: {type(error).__name__}: {error}"
            result = Result("failed", result.seconds, text)
            with contextlib.suppress(OSError):  # the disk; the next job writes it too
                add(job, result)
        self._say(job, result)

    def _say(self, job: Job, result: Result) -> None:
        """Print and count."""
        self.num_failed += result.outcome == "failed"
        print(f"{result.outcome}: {job.name}, {result.seconds:.1f} s", flush=True)
        if result.outcome == "failed":
            print(result.text[-_SAID:], flush=True)
