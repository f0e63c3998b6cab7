"""Record of the tests of ``tests/gpu`` that passed, by GPU. The repository keeps it.

    python -m pytest -m gpu tests/gpu --junitxml=report.xml
    python -m benchmarks.gpu_tests report.xml       # adds to results/gpu_tests.json
    python -m benchmarks.gpu_tests --merge run.json # a record of python -m benchmarks.gpu

The conftest of ``tests/gpu`` writes GPU, date and torch's version into a report, test by test. The
record of a budgeted run also has cases: their outcomes go into ``results/gpu_cases.json``, their
numbers onto the pages of the cases. ``docs/support.md`` prints the record of the tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, outcomes
from benchmarks.outcomes import Outcome
from megatron_lightning.cards.header import read_record as header_of

RECORD = machine.RESULTS / "gpu_tests.json"
CASES_RECORD = machine.RESULTS / "gpu_cases.json"
FACTS = ("gpu", "date", "torch", "commit")
"""Fields of an outcome that a report says."""
_FOLDER = "gpu/"


def read_report(report: Path, defaults: Mapping[str, str] | None = None) -> dict[str, Outcome]:
    """Return test below ``tests/gpu``, with its case in brackets -> outcome.

    Args:
        report: Of pytest, in JUnit's format.
        defaults: :data:`FACTS` of a report without them.

    Raises:
        ValueError: If nothing says on which GPU a test ran.
    """
    found: dict[str, Outcome] = {}
    for case in outcomes.read_report(report):
        name = case.test.removeprefix(_FOLDER)
        if name == case.test or "::" not in name:
            continue
        facts = {**(defaults or {}), **case.facts}
        if name in found and found[name].outcome == "failed":
            continue  # a test and what follows it are two entries
        if case.outcome != "skipped" and "gpu" not in facts:
            raise ValueError(f"{report} does not say on which GPU {name} ran. Set --gpu.")
        if "gpu" in facts:
            known = {key: facts[key] for key in FACTS if key in facts}
            found[name] = Outcome(outcome=case.outcome, **known)
    return found


def read_record(path: Path = RECORD) -> dict[str, Outcome]:
    """Return the record."""
    return outcomes.read_record(path)


def add(found: Mapping[str, Outcome], path: Path = RECORD) -> dict[str, Outcome]:
    """Write outcomes into the record, as :func:`benchmarks.outcomes.add` does, and return it."""
    return outcomes.add(found, path)


def cell(test: str | None, record: Mapping[str, Outcome]) -> str:
    """Return what the support matrix says of a test: how many of the cases run last passed.

    Args:
        test: Below ``tests/gpu``, with or without a case. None: there is no test.
        record: As :func:`read_record` returns it.
    """
    if test is None:
        return "written, not yet run"
    found = [each for name, each in record.items() if name == test or name.startswith(f"{test}[")]
    ran = [each for each in found if each.outcome != "skipped"]
    failed = [each for each in ran if each.outcome == "failed"]
    if not ran:
        return f"written, not yet run: `{test}`"
    last = max(failed or ran, key=lambda each: each.date)
    cases = f" ({len(ran) - len(failed)} of {len(ran)} cases)" if 0 < len(failed) < len(ran) else ""
    outcome = "failed" if len(failed) == len(ran) else "passed"
    return f"{outcome} on {last.gpu}, {last.date}{cases}: `{test}`"


def merge(path: Path, folder: Path = machine.RESULTS) -> tuple[int, int]:
    """Add a budgeted run to the records and pages of a folder; return its tests and cases."""
    from benchmarks.gpu.cases import record_of, write
    from benchmarks.gpu.record import RunRecord

    found = header_of(path)
    run = RunRecord(path, found["header"], path)
    outcomes.add(run.tests, folder / RECORD.name)
    outcomes.add(run.outcomes(), folder / CASES_RECORD.name)
    by_case: dict[str, dict[str, Any]] = {}
    for name, entry in run.cases.items():
        case, _, item = name.partition("/")
        by_case.setdefault(case, {})[item] = entry
    for case, entries in by_case.items():
        record = record_of(case, folder)
        for item, entry in entries.items():
            record.add(item, entry["numbers"], entry["header"])
        write(case, record, run.header)
    return len(run.tests), len(run.cases)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and add reports to the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reports", nargs="*", type=Path, help="reports of pytest, oldest first")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="FILE",
        help="records of python -m benchmarks.gpu, oldest first",
    )  # fmt: skip
    for name in FACTS:
        parser.add_argument(f"--{name}", help=f"{name} of reports that do not say it")
    options = vars(parser.parse_args(arguments))
    if not options["reports"] and not options["merge"]:
        parser.error("there is nothing to add. Name reports of pytest, or --merge FILE.")
    for run in options["merge"]:
        if not run.is_file():
            parser.error(f"--merge: there is no file {run}")
        tests, cases = merge(run)
        print(f"{run}: {tests} tests, {cases} cases; written: {RECORD} and {CASES_RECORD.name}")
    defaults = {name: options[name] for name in FACTS if options[name] is not None}
    for report in options["reports"]:
        found = read_report(report, defaults)
        add(found)
        passed = sum(each.outcome == "passed" for each in found.values())
        print(f"{report}: {len(found)} tests, {passed} passed; written: {RECORD}")


if __name__ == "__main__":
    main()
