"""Which tests of ``tests/gpu`` passed on which GPU: a record that the repository keeps.

    python -m pytest -m gpu tests/gpu --junitxml=report.xml
    python -m benchmarks.gpu_tests report.xml   # adds to results/gpu_tests.json

The conftest of ``tests/gpu`` writes GPU, date and torch's version into the report, test by test.
``python -m benchmarks.gpu`` does both. ``docs/support.md`` prints the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks import machine

RECORD = machine.RESULTS / "gpu_tests.json"
_FAULTS = ("failure", "error")


class Outcome(NamedTuple):
    """How a test ended."""

    outcome: str
    """passed, failed or skipped."""
    gpu: str
    date: str
    torch: str


def read_report(report: Path, defaults: Mapping[str, str] | None = None) -> dict[str, Outcome]:
    """Return test below ``tests/gpu``, with its case in brackets -> outcome.

    Args:
        report: Of pytest, in JUnit's format.
        defaults: ``gpu``, ``date`` and ``torch`` of a report without them.

    Raises:
        ValueError: If nothing says on which GPU a test ran.
    """
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        package, _, module = case.attrib["classname"].rpartition(".")
        if package != "tests.gpu":
            continue
        name = f"{module}.py::{case.attrib['name']}"
        own = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        facts = {**(defaults or {}), **own}
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        if kinds & set(_FAULTS):
            outcome = "failed"
        elif name in found and found[name].outcome == "failed":
            continue  # a test and what follows it are two entries
        if outcome != "skipped" and "gpu" not in facts:
            raise ValueError(f"{report} does not say on which GPU {name} ran. Set --gpu.")
        if "gpu" in facts:
            found[name] = Outcome(outcome, facts["gpu"], facts["date"], facts["torch"])
    return found


def read_record(path: Path = RECORD) -> dict[str, Outcome]:
    """Return the record."""
    entries = json.loads(path.read_text()) if path.is_file() else {}
    return {name: Outcome(**entry) for name, entry in entries.items()}


def add(outcomes: Mapping[str, Outcome], path: Path = RECORD) -> dict[str, Outcome]:
    """Write outcomes into the record, in place of earlier ones of the same tests, and return it.
    A test that is skipped leaves what an earlier run has found.
    """
    record = read_record(path)
    for name, outcome in outcomes.items():
        if outcome.outcome != "skipped" or name not in record:
            record[name] = outcome
    entries = {name: record[name]._asdict() for name in sorted(record)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n")
    return record


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and add reports to the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reports", nargs="+", type=Path, help="reports of pytest, oldest first")
    for name in Outcome._fields[1:]:
        parser.add_argument(f"--{name}", help=f"{name} of reports that do not say it")
    options = vars(parser.parse_args(arguments))
    defaults = {name: options[name] for name in Outcome._fields[1:] if options[name] is not None}
    for report in options["reports"]:
        outcomes = read_report(report, defaults)
        add(outcomes)
        passed = sum(each.outcome == "passed" for each in outcomes.values())
        print(f"{report}: {len(outcomes)} tests, {passed} passed; written: {RECORD}")


if __name__ == "__main__":
    main()
