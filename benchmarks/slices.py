"""Records of passed tests for the support matrix, and reasons for skips.

    make test-slice                                       # writes .pytest_cache/report.xml
    python -m benchmarks.slices .pytest_cache/report.xml  # skips by module
    python -m benchmarks.slices --keep .pytest_cache/report.xml

The second command prints the skips of a report by module, and exits with 1 where
``tests/skips.yaml`` has no reason for one. ``make test-slice`` and ``make test-all`` end with it.
With ``--keep`` the outcomes of tests that ``docs/support.yaml`` names go into
``results/slices.json``, and ``python -m benchmarks.support --write`` prints them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks import machine, outcomes
from benchmarks.outcomes import Case, Outcome

RECORD = machine.RESULTS / "slices.json"
SKIPS = machine.ROOT / "tests" / "skips.yaml"
TABLE = machine.ROOT / "docs" / "support.yaml"


class Reason(NamedTuple):
    """Why tests may be skipped."""

    tests: str
    """Regular expression that the path below ``tests/`` begins with."""
    says: str
    """Regular expression found in what the skip says."""
    why: str


def reasons(path: Path = SKIPS) -> list[Reason]:
    """Return the list of skips that have a reason."""
    return [Reason(**entry) for entry in yaml.safe_load(path.read_text())]


def skips(cases: Sequence[Case], known: Sequence[Reason]) -> tuple[list[str], bool]:
    """Return lines that count skipped tests by module, and whether every skip has a reason. A test
    that another report has passed is not skipped.

    Args:
        cases: Tests of all reports.
        known: Skips that have a reason.
    """
    ran = {case.test for case in cases if case.outcome != "skipped"}
    counts = Counter(
        (case.test.partition("::")[0], case.skip)
        for case in cases
        if case.outcome == "skipped" and case.test not in ran
    )
    lines, explained = [], True
    for (module, said), count in sorted(counts.items()):
        why = next(
            (
                each.why
                for each in known
                if re.match(each.tests, module) and re.search(each.says, said)
            ),
            None,
        )
        explained = explained and why is not None
        lines.append(f"{module}: {count} skipped, {said}: {why or 'NO REASON IN tests/skips.yaml'}")
    return lines, explained


def node(test: str, case: str) -> str:
    """Return a test of the support matrix as pytest names it."""
    return f"{test}[{case}]" if case else test


def named_tests() -> Iterator[str]:
    """Yield the tests that the support matrix names, with their cases in brackets."""
    for row in yaml.safe_load(TABLE.read_text()):
        for test, cells in row.get("tested", {}).items():
            yield from (node(test, case) for case in cells.values())


def found_in(cases: Iterable[Case]) -> dict[str, Outcome]:
    """Return test -> outcome.

    Raises:
        ValueError: If the report does not name a commit, or the tree differed from the commit.
    """
    found: dict[str, Outcome] = {}
    for case in cases:
        if case.test in found and found[case.test].outcome == "failed":
            continue  # a test and what follows it are two entries
        if case.outcome != "skipped":
            commit = case.facts.get("commit", "")
            if not commit or commit.endswith("-modified"):
                raise ValueError(
                    f"{case.test} ran on {commit or 'no commit'}, and a record names commits. "
                    "Commit your changes, and run the tests again."
                )
            facts = {key: case.facts[key] for key in ("date", "torch")}
            found[case.test] = Outcome(case.outcome, commit=commit, **facts)
    return found


def word(test: str, record: Mapping[str, Outcome]) -> str:
    """Return what the support matrix says of a test: tested, failed, or not in the record."""
    outcome = record[test].outcome if test in record else "written"
    return {"passed": "tested"}.get(outcome, outcome)


def place(tests: Iterable[str], record: Mapping[str, Outcome]) -> str:
    """Return commits and dates of tests in the record."""
    found = sorted({(record[t].date, record[t].commit) for t in tests if t in record})
    return ", ".join(f"{date} at {commit}" for date, commit in found) or "not in the record"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the skips of reports, and keep the outcomes where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reports", nargs="+", type=Path, help="reports of pytest, oldest first")
    parser.add_argument("--keep", action="store_true", help=f"add outcomes to {RECORD.name}")
    options = parser.parse_args(arguments)
    cases = [case for report in options.reports for case in outcomes.read_report(report)]
    lines, explained = skips(cases, reasons())
    print("\n".join(["Skipped tests, by module:", *(lines or ["none"])]))
    if options.keep:
        named = set(named_tests())
        record = outcomes.add(
            {test: each for test, each in found_in(cases).items() if test in named}, RECORD, named
        )
        passed = sum(each.outcome == "passed" for each in record.values())
        print(
            f"{RECORD.name}: {len(named)} tests that the support matrix names, {passed} passed. "
            "Now run python -m benchmarks.support --write."
        )
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
