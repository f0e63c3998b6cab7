"""The GPU-marked tests and benchmarks on one GPU; needs nothing but the checkout on the path and
never downloads.

    python -m benchmarks.gpu              # tests and main benchmarks, 8 minutes; writes results/
    python -m benchmarks.gpu --case step  # one longer case; run it again to continue it

Without a GPU both print so and exit with code 0, so that one command works on every machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import (
    bench_gpu,
    gpu_cases,
    gpu_inference,
    gpu_moe,
    gpu_precision,
    gpu_tests,
    machine,
)
from benchmarks.gpu_cases import Item
from megatron_lightning.cards.header import read_record, with_header

BUDGET_S = 7.5 * 60
"""Less than 8 minutes, since the last measurement may take longer than expected."""
TESTS_S = 240.0
_WORKERS = 8
"""Processes of the tests, which share the GPU; with one they take 9 minutes."""
CASES: Mapping[str, Mapping[str, Item]] = {
    **gpu_cases.CASES,
    **gpu_precision.CASES,
    **bench_gpu.CASES,
    **gpu_moe.CASES,
    **gpu_inference.CASES,
}
HEADLINE: Mapping[str, Item] = {
    **gpu_cases.HEADLINE,
    **bench_gpu.HEADLINE,
    **gpu_inference.HEADLINE,
}


class Record:
    """Measured items in a JSON file, written after each one, so that an interrupted run loses only
    its current item.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.entries: dict[str, Any] = (
            read_record(path)["entries"] if resume and path.exists() else {}
        )

    def add(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Write one item with place and time of its measurement; the file is replaced
        atomically.
        """
        header = machine.describe()
        self.entries[name] = {"header": header, "numbers": numbers}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps({"header": header, "entries": self.entries}, indent=1) + "\n")
        written.replace(self.path)

    def has(self, name: str) -> bool:
        """Return whether the item was measured, on this code and this GPU, without failing."""
        entry = self.entries.get(name)
        if entry is None or "failed" in entry["numbers"]:
            return False
        now = machine.describe()
        return all(entry["header"][key] == now[key] for key in ("commit", "gpu", "versions"))


def run_items(items: Mapping[str, Item], record: Record, deadline: float) -> int:
    """Measure the items that are not in the record and fit into the time; return how many are
    missing or failed.
    """
    missing = 0
    for name, item in items.items():
        if record.has(name):
            print(f"{name}: measured before", flush=True)
            continue
        if time.monotonic() + item.seconds > deadline:
            print(
                f"{name}: left for the next run, {deadline - time.monotonic():.0f} s are not "
                "enough",
                flush=True,
            )
            missing += 1
            continue
        try:
            numbers = item.measure()
        except Exception as error:  # one failing measurement must not cost the others
            traceback.print_exc()
            numbers = {"failed": f"{type(error).__name__}: {error}"}
            missing += 1
        record.add(name, numbers)
        print(f"{name}: {json.dumps(summary(numbers))}", flush=True)
    return missing


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


def run_tests() -> dict[str, Any]:
    """Run the GPU-marked tests, and add their outcomes to the record; return their result."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        if find_spec("xdist") is not None:
            command += ["-n", str(_WORKERS)]
        command += [f"--junitxml={report}", "tests/gpu"]
        try:
            run = subprocess.run(
                command, cwd=machine.ROOT, capture_output=True, text=True, timeout=TESTS_S
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"the tests took more than {TESTS_S} s"}
        if report.exists():
            gpu_tests.add(gpu_tests.read_report(report))
    print(run.stdout, run.stderr, sep="\n", flush=True)
    last = next((line for line in reversed(run.stdout.splitlines()) if line.strip()), "no output")
    return (
        {"result": last}
        if run.returncode == 0
        else {"failed": f"exit code {run.returncode}: {last}"}
    )


def headline(folder: Path, deadline: float) -> int:
    """Run tests and headline benchmarks; return how many failed or are missing."""
    stamp = machine.describe()["date"].replace(":", "").replace("+0000", "")
    record = Record(folder / f"gpu_{stamp}.json", resume=False)
    tests = run_tests()
    record.add("tests", tests)
    missing = run_items(HEADLINE, record, deadline) + ("failed" in tests)
    return _finish(record, missing)


def one_case(case: str, folder: Path, deadline: float) -> int:
    """Run or continue a case; return how many items failed or are missing."""
    record = Record(folder / f"gpu_case_{case}.json", resume=True)
    return _finish(record, run_items(CASES[case], record, deadline))


def _finish(record: Record, missing: int) -> int:
    record.path.with_suffix(".md").write_text(with_header(markdown(record), machine.describe()))
    print(
        f"written: {record.path} and {record.path.with_suffix('.md').name}; {missing or 'nothing'} "
        "failed or missing"
    )
    return missing


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        help=f"one longer case of {', '.join(CASES)}; without it, tests and headline benchmarks",
    )
    parser.add_argument(
        "--results", type=Path, default=machine.RESULTS, help="folder of the result files"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device here, so there is nothing to "
            "test or measure."
        )
        return
    if options.case is not None and options.case not in CASES:
        parser.error(f"there is no case {options.case!r}; set CASE to one of {', '.join(CASES)}.")
    deadline = time.monotonic() + BUDGET_S
    missing = (
        one_case(options.case, options.results, deadline)
        if options.case
        else headline(options.results, deadline)
    )
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
