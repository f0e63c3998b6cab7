"""Run Lightning's own tests against MegatronStrategy and compare, file by file, with ``known.csv``.

    python -m tests.conformance.run /path/to/lightning --mode one trainer/flags core/test_results.py

``/path/to/lightning`` is a checkout of Lightning's repository at the tag of the installed version.
Every file of tests has a pytest process of its own. A file in which more test functions fail than
``known.csv`` says runs under plain Lightning as well, and what fails or is skipped there does not
count. ``docs/conformance.md`` has the reasons.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.plugin import MODES

_ROOT = Path(__file__).parents[2]


def files_of(suite: Path, parts: Sequence[str]) -> list[str]:
    """Return the test files under ``parts``, folders or files of the suite; all of them if there
    are no parts."""
    found: set[Path] = set()
    for part in parts or ["."]:
        path = suite / part
        if not path.exists():
            raise SystemExit(f"{path} does not exist; name folders or files of {suite}")
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    return sorted(str(path.relative_to(suite)) for path in found)


def run(suite: Path, file: str, mode: str, limit_s: float) -> Mapping[str, tuple[str, str]] | None:
    """Return outcome (passed, skipped or failed) and reason of each test of a file; None if it did
    not run to its end."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        report = Path(scratch, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            f"tests_pytorch/{file}",
            "-p",
            "no:cacheprovider",
            f"--rootdir={suite.parent}",
        ]
        command += [
            "-p",
            "tests.conformance.plugin",
            "--megatron",
            mode,
            f"--junitxml={report}",
            f"--basetemp={scratch}/tmp",
        ]
        # A newer torch warns of what Lightning's own data loading does, and the suite makes errors
        # of such warnings.
        command += ["--timeout=120", "-W", "ignore:.*LeafSpec:FutureWarning"]
        process = subprocess.Popen(
            command,
            cwd=suite.parent,
            # What the caller's own PYTHONPATH adds, packages the suite needs, comes behind.
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.getenv("PYTHONPATH")]))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that all it starts can be ended
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if not report.exists():
            return None
        cases = list(ElementTree.parse(report).iter("testcase"))
    if not all(case.get("classname") for case in cases):  # the file could not be imported
        return None
    return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return outcome, " ".join((found.get("message") or "").split())[:300]
    return "passed", ""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def functions_of(tests: Mapping[str, str]) -> set[str]:
    """Return the names of tests without their parameters."""
    return {name.partition("[")[0] for name in tests}


def known_differences(mode: str) -> Mapping[str, int]:
    """Return file -> number of test functions that are known to differ in ``mode``."""
    with Path(__file__).with_name("known.csv").open(newline="") as lines:
        return {row["file"]: int(row.get(mode) or 0) for row in csv.DictReader(lines)}


def main() -> int:
    """Run, print a line for every file, and every failure where there are too many; return 1 if
    there are such files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lightning", type=Path, help="checkout of Lightning's repository")
    parser.add_argument(
        "parts", nargs="*", help="folders or files of tests/tests_pytorch; none: all of it"
    )
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--limit-s", type=float, default=1200, help="seconds for one file")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended, too
    suite = (options.lightning / "tests" / "tests_pytorch").resolve()
    known, total, is_new = known_differences(options.mode), Counter[str](), False
    for file in files_of(suite, options.parts):
        outcomes = run(suite, file, options.mode, options.limit_s)
        if outcomes is None:
            does_plain = run(suite, file, "plain", options.limit_s) is not None
            is_new = is_new or does_plain
            print(
                f"{file}: does not run to its "
                f"end{'' if does_plain else ', nor under plain Lightning'}",
                flush=True,
            )
            continue
        failed = {
            test: reason for test, (outcome, reason) in outcomes.items() if outcome == "failed"
        }
        if len(functions_of(failed)) > known.get(file, 0):
            plain = run(suite, file, "plain", options.limit_s) or {}
            failed = {
                test: reason
                for test, reason in failed.items()
                if plain.get(test, ("passed",))[0] == "passed"
            }
        num_failing = len(functions_of(failed))
        counts = Counter(outcome for outcome, _ in outcomes.values())
        total += counts + Counter(differing=num_failing)
        print(
            f"{file}: {_listed(counts)}; {num_failing} functions differ, {known.get(file, 0)} are "
            "known to",
            flush=True,
        )
        if num_failing > known.get(file, 0):
            is_new = True
            print(
                "\n".join(f"    {test}: {reason}" for test, reason in sorted(failed.items())),
                flush=True,
            )
    print(_listed(total))
    return int(is_new)


if __name__ == "__main__":
    sys.exit(main())
