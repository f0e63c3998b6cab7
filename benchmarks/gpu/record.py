"""Records of runs on a GPU: a file of measured items, and a file of a budgeted run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine, outcomes
from benchmarks.outcomes import Outcome
from megatron_lightning.cards.header import read_record, with_header

_OF_THE_CODE = ("commit", "gpu", "versions")
"""Fields of a header that differ where a measurement has to be repeated."""


class Record:
    """Measured items in a JSON file, written after each one, so that an interrupted run loses only
    its current item.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.entries: dict[str, Any] = (
            read_record(path)["entries"] if resume and path.exists() else {}
        )

    def add(
        self, name: str, numbers: Mapping[str, Any], header: Mapping[str, Any] | None = None
    ) -> None:
        """Write one item with place and time of its measurement; the file is replaced
        atomically.
        """
        header = header or machine.describe()
        self.entries[name] = {"header": header, "numbers": numbers}
        replace(self.path, {"header": header, "entries": self.entries})

    def has(self, name: str) -> bool:
        """Return whether the item was measured, on this code and this GPU, without failing."""
        entry = self.entries.get(name)
        if entry is None or "failed" in entry["numbers"]:
            return False
        now = machine.describe()
        return all(entry["header"][key] == now[key] for key in _OF_THE_CODE)

    def write_page(self, header: Mapping[str, Any]) -> None:
        """Write the page beside the numbers."""
        self.path.with_suffix(".md").write_text(with_header(markdown(self), header))


class RunRecord:
    """A budgeted run: outcomes of tests, what failures said, and numbers of cases.

    Args:
        path: The JSON file, replaced after every job.
        header: Of this run.
        earlier: Records that this one goes on from; their entries are kept.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *earlier: Path) -> None:
        self.path, self.header = path, header
        self.tests: dict[str, Outcome] = {}
        self.cases: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.bundles = "none"
        """Those that were unpacked, or why there are none."""
        self.probe: Mapping[str, Any] = {}
        for each in earlier:
            kept = read_record(each)
            self.tests |= {name: Outcome(**entry) for name, entry in kept["tests"].items()}
            self.cases |= kept["cases"]
            self.failures |= kept["failures"]

    def add_test(self, name: str, outcome: Outcome, text: str) -> None:
        """Write the outcome of a test, and what its failure says."""
        self.tests[name] = outcome
        self._said(name, text)

    def add_case(self, name: str, numbers: Mapping[str, Any], seconds: float) -> None:
        """Write the numbers of a case."""
        self.cases[name] = {"header": self.header, "numbers": numbers, "seconds": seconds}
        self._said(name, str(numbers.get("failed", "")))

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcomes of the cases."""
        return {
            name: outcome_of(
                "failed" if "failed" in entry["numbers"] else "passed",
                entry["header"], entry["seconds"],
            )
            for name, entry in self.cases.items()
        }  # fmt: skip

    def _said(self, name: str, text: str) -> None:
        self.failures.pop(name, None)
        if text:
            self.failures[name] = text
        self.write()

    def write(self) -> None:
        """Replace the file."""
        tests = {
            name: {key: value for key, value in each._asdict().items() if value}
            for name, each in sorted(self.tests.items())
        }
        replace(self.path, {
            "header": self.header, "bundles": self.bundles, "probe": self.probe, "tests": tests,
            "cases": self.cases, "failures": self.failures,
        })  # fmt: skip


def outcome_of(outcome: str, header: Mapping[str, Any], seconds: float) -> Outcome:
    """Return the outcome of a job that ran under a header."""
    return Outcome(
        outcome, header["date"][:10], header["versions"]["torch"], commit=header["commit"] or "",
        gpu=header["gpu"] or "", seconds=round(seconds, 1),
    )  # fmt: skip


def replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as :func:`benchmarks.outcomes.replace` does."""
    outcomes.replace(path, json.dumps(content, indent=1, default=str) + "\n")


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as a JSON file holds them; other values become texts."""
    found: dict[str, Any] = json.loads(json.dumps(numbers, default=str))
    return found


def summary(numbers: Any) -> Any:
    """Return the rounded numbers, without the individual measurements."""
    if isinstance(numbers, Mapping):
        return {
            key: summary(value)
            for key, value in numbers.items()
            if key not in ("times_ms", "wall_s", "losses")
        }
    if isinstance(numbers, list):
        return [summary(value) for value in numbers]
    return float(f"{numbers:.4g}") if isinstance(numbers, float) else numbers


def markdown(record: Record) -> str:
    """Return the record as a page."""
    lines = ["# GPU benchmarks", ""]
    for name, entry in record.entries.items():
        facts, numbers = entry["header"], summary(entry["numbers"])
        versions = ", ".join(f"{package} {number}" for package, number in facts["versions"].items())
        lines += [
            f"## {name}",
            "",
            f"{facts['date']}, {facts['gpu']}; {versions}; commit {facts['commit']}",
            "",
        ]
        lines += ["| what | result |", "| --- | --- |"]
        for key, value in numbers.items():
            shown = (
                value
                if not isinstance(value, dict)
                else ", ".join(f"{name} {number}" for name, number in value.items())
            )
            lines.append(f"| {key} | {shown} |")
        lines.append("")
    return "\n".join(lines)
