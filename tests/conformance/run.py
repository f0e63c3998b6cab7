"""Run Lightning's own tests against MegatronStrategy, file by file, and say what is new against ``known/<mode>.toml``.

    python -m tests.conformance.run /path/to/lightning --mode one trainer/flags core/test_results.py

``/path/to/lightning`` is a checkout of Lightning's repository at the tag of the installed version. Every file of tests has a
process of its own, forked from one that has torch loaded, and a time limit: what hangs or dies is a failure of the test that
was under way, and the tests after it run in another process. A failure that ``known/`` does not list is tried under plain
Lightning too, and is no news if it fails there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.known import KnownFailures
from tests.conformance.plugin import MODES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Lightning's tests and how to run them."""

    folder: Path
    """``tests/tests_pytorch`` of a checkout."""
    mode: str
    """One of ``MODES``."""
    test_limit_s: float
    """Seconds for one test."""
    file_limit_s: float
    """Seconds for one process."""
    _server: Any = field(default_factory=lambda: _fork_server())
    _scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="conformance-")))

    def files(self, parts: Sequence[str]) -> list[str]:
        """Return the test files under ``parts``, folders or files of the suite; of all of it if there are none."""
        found: set[Path] = set()
        for part in parts or ["."]:
            path = self.folder / part
            if not path.exists():
                raise SystemExit(f"{path} does not exist; name folders or files of {self.folder}")
            found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def run(self, file: str, *, mode: str, only: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
        """Run a file's tests, or those named in ``only``.

        Returns:
            test -> outcome, ``"passed"``, ``"failed"`` or ``"skipped"``, and why.
        """
        outcomes: dict[str, tuple[str, str]] = {}
        while True:
            found, running = self._run_once(file, mode, only, done=list(outcomes))
            outcomes |= found
            if running is None:
                return outcomes
            outcomes[running] = ("failed", "the process ended, or ran into its time limit, in this test")

    def _run_once(
        self, file: str, mode: str, only: Sequence[str], done: Sequence[str]
    ) -> tuple[dict[str, tuple[str, str]], str | None]:
        """Return what one process found, and the test it was at when it ended before its time."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch, prefix=file.replace("/", "-") + "-"))
        tests = [f"tests_pytorch/{test}" for test in only or [file]] + [f"--deselect=tests_pytorch/{test}" for test in done]
        arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={self.folder.parent}", *tests]
        # A newer torch warns of what Lightning's own data loading does, and the suite makes errors of such warnings.
        arguments += ["--timeout", str(self.test_limit_s), "-W", "ignore:.*LeafSpec:FutureWarning"]
        arguments += ["-p", "tests.conformance.plugin", "--megatron", mode]
        arguments += ["--megatron-results", str(folder / "results.jsonl"), f"--basetemp={folder}/tmp"]
        process = self._server.Process(target=_pytest, args=(arguments, self.folder.parent, folder / "output.txt"))
        process.start()
        _wait(process, self.file_limit_s)
        outcomes, running = _read(folder / "results.jsonl")
        if not outcomes and running is None and not done and process.exitcode not in (0, 5):
            print((folder / "output.txt").read_text()[-3000:])
            return {file: ("failed", f"no test ran; see {folder}")}, None
        return outcomes, running


def _fork_server() -> Any:
    """Return what starts processes that have imported already what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchmetrics", "lightning.pytorch", "megatron_lightning.strategies"])
    return context


def _pytest(arguments: list[str], folder: Path, output: Path) -> None:
    """Be a pytest process, in a session of its own so that all it starts can be ended."""
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["pytest", *arguments]
    sys.exit(pytest.main(arguments))


def _wait(process: BaseProcess, limit_s: float) -> None:
    """Wait for a process; when it is over, or time is up, end all that it has started."""
    try:
        process.join(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _read(path: Path) -> tuple[dict[str, tuple[str, str]], str | None]:
    """Return the outcomes in a results file, and the test that was begun last if it has not ended."""
    outcomes: dict[str, tuple[str, str]] = {}
    running = None
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if line["outcome"] in ("started", "finished"):
            running = line["test"] if line["outcome"] == "started" else None
        elif outcomes.get(line["test"], ("",))[0] != "failed":
            outcomes[line["test"]] = line["outcome"], line["why"]
    if running is not None:
        outcomes.pop(running, None)
    return outcomes, running


def news(suite: Suite, outcomes: Mapping[str, tuple[str, str]], known: KnownFailures) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, test, why) for each test: passed, skipped, plain, NEW, stale, or the class of a known failure."""
    failed = [test for test, (outcome, _) in outcomes.items() if outcome == "failed"]
    new = [test for test in failed if test not in known]
    plain = suite.run("plain", mode="plain", only=new) if new and suite.mode != "plain" else {}
    for test, (outcome, why) in sorted(outcomes.items()):
        if outcome != "failed":
            yield "stale" if outcome == "passed" and test in known else outcome, test, why
        elif test in known:
            yield known.class_of(test), test, why
        else:
            yield "plain" if plain.get(test, ("",))[0] in ("failed", "skipped") else "NEW", test, why


def main() -> int:
    """Run, print a line for every failure and a table of counts; return 1 if something is new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lightning", type=Path, help="checkout of Lightning's repository")
    parser.add_argument("parts", nargs="*", help="folders or files of tests/tests_pytorch; none: all of it")
    parser.add_argument("--mode", choices=MODES, default="one")
    parser.add_argument("--test-limit-s", type=float, default=120)
    parser.add_argument("--file-limit-s", type=float, default=1200)
    parser.add_argument("--write", type=Path, help="file to which one line of JSON is appended for every test")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended, too
    suite = Suite(
        folder=(arguments.lightning / "tests" / "tests_pytorch").resolve(),
        mode=arguments.mode,
        test_limit_s=arguments.test_limit_s,
        file_limit_s=arguments.file_limit_s,
    )
    known = KnownFailures.of(arguments.mode)
    counts: dict[str, Counter[str]] = {}
    for file in suite.files(arguments.parts):
        for kind, test, why in news(suite, suite.run(file, mode=suite.mode), known):
            counts.setdefault(str(Path(file).parent), Counter())[kind] += 1
            if kind not in ("passed", "skipped"):
                print(f"{kind}: {test}\n    {why.splitlines()[0][:300] if why else ''}", flush=True)
            if arguments.write is not None:
                with arguments.write.open("a") as output:
                    print(json.dumps({"kind": kind, "test": test, "why": why}), file=output)
    for folder, kinds in sorted(counts.items()):
        print(f"{folder}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return int(any(kinds["NEW"] for kinds in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
