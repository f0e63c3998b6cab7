"""Outcomes of tests: pytest's reports, and the JSON files in which the repository keeps them.

Two records are read here alone: ``gpu_tests.json`` (:mod:`benchmarks.gpu_tests`) and
``slices.json`` (:mod:`benchmarks.slices`). ``tests/conftest.py`` writes commit, date and torch's
version into a report, and ``tests/gpu/conftest.py`` the GPU, test by test: a run may be cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_FAULTS = {"failure", "error"}


class Outcome(NamedTuple):
    """How a test ended."""

    outcome: str
    """passed, failed or skipped."""
    date: str
    torch: str
    commit: str = ""
    """Empty in reports older than the property."""
    gpu: str = ""
    """Empty: the test ran on CPU processes."""
    seconds: float = 0.0
    """0: not measured."""


class Case(NamedTuple):
    """A test of a report."""

    test: str
    """Below ``tests/``, with its case in brackets. A module that was not collected: the file."""
    outcome: str
    skip: str
    """Reason of a skip. Empty: the test ran."""
    facts: Mapping[str, str]
    """Properties of the test: fields of :class:`Outcome`."""


def read_report(report: Path) -> Iterator[Case]:
    """Yield the tests of a report of pytest in JUnit's format. A test and an error after the test
    are two cases of one name.
    """
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if "classname" not in case.attrib:
            continue  # cut off while it ran
        module, name = case.attrib["classname"], f"::{case.attrib['name']}"
        if not module:  # skipped or broken while it was imported
            module, name = case.attrib["name"], ""
        package, _, path = module.partition(".")
        if package != "tests":
            continue
        kinds = {child.tag: child for child in case}
        skipped = kinds.get("skipped")
        if skipped is not None and skipped.get("type") == "pytest.xfail":
            skipped = None
        outcome = "failed" if kinds.keys() & _FAULTS else "passed" if skipped is None else "skipped"
        facts = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        test = f"{path.replace('.', '/')}.py{name}"
        yield Case(test, outcome, "" if skipped is None else _words(skipped), facts)


def _words(skipped: ElementTree.Element) -> str:
    """Return why a test was skipped, without the place that pytest puts before."""
    said = skipped.get("message", "")
    if said == "collection skipped":  # the text is a tuple of file, line and message
        found = re.search(r"Skipped: (.*?)[\"']?\)?$", skipped.text or "", re.DOTALL)
        return found[1] if found else skipped.text or ""
    return said


def read_record(path: Path) -> dict[str, Outcome]:
    """Return test -> outcome of a record."""
    entries = json.loads(path.read_text()) if path.is_file() else {}
    return {name: Outcome(**entry) for name, entry in entries.items()}


def add(
    outcomes: Mapping[str, Outcome], path: Path, known: Collection[str] | None = None
) -> dict[str, Outcome]:
    """Write outcomes into a record, in place of earlier ones of the same tests, and return it.
    A test that is skipped leaves what an earlier run has found.

    Args:
        outcomes: Test -> outcome.
        path: The record.
        known: The only tests that the record keeps. None: all.
    """
    record = read_record(path)
    for name, outcome in outcomes.items():
        if outcome.outcome != "skipped" or name not in record:
            record[name] = outcome
    names = sorted(name for name in record if known is None or name in known)
    record = {name: record[name] for name in names}
    # One line a test, without empty fields: small, and a difference shows the tests that changed.
    lines = [
        f"{json.dumps(name)}: {json.dumps({k: v for k, v in each._asdict().items() if v})}"
        for name, each in record.items()
    ]
    replace(path, "{\n " + ",\n ".join(lines) + "\n}\n")
    return record


def replace(path: Path, text: str) -> None:
    """Write a file beside ``path``, and rename it: a cut leaves the file before or after."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(text)
    written.replace(path)
