"""A process that runs tests, or measures cases, one by one as it is told over a pipe.

    python -m benchmarks.gpu.worker DESCRIPTOR tests FOLDER MARKER
    python -m benchmarks.gpu.worker DESCRIPTOR cases

It sends the :class:`Names` of all jobs first. Then each name that it receives is run, and answered
with a :class:`Result`. None, or the end of the pipe, ends it. Imports and the compiler's caches are
paid once; a process that hangs is replaced (:mod:`benchmarks.gpu.pool`). One whose starter was
killed ends at once, with its ranks, which would keep the GPU's memory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.gpu.jobs import Names, Result

_WATCH_S = 0.5


class _Told:
    """Replaces pytest's loop: runs collected tests by name.

    Args:
        pipe: Names come in, results go out.
        folder: Names of jobs begin below it.
    """

    def __init__(self, pipe: Connection, folder: str) -> None:
        self.pipe, self.folder = pipe, Path(folder).resolve()
        self.root = self.folder
        self.reports: list[pytest.TestReport] = []
        self.broken: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        """Note what names of tests begin below."""
        self.root = config.rootpath

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.broken[self._name(report.nodeid)] = str(report.longrepr)

    def _name(self, node: str) -> str:
        path, *rest = node.split("::", 1)
        return "::".join([(self.root / path).relative_to(self.folder).as_posix(), *rest])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what the pipe names."""
        items = {self._name(item.nodeid): item for item in session.items}
        limits_s = {name: limit for name, item in items.items() if (limit := _limit_s(item))}
        self.pipe.send(Names(dict.fromkeys(items, 0.0), self.broken, limits_s))
        while (name := _next(self.pipe)) is not None:
            self.reports.clear()
            # The next test is unknown, so that no fixture outlives a test.
            items[name].ihook.pytest_runtest_protocol(item=items[name], nextitem=None)
            self.pipe.send(_result(self.reports))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the phases of the test that runs."""
        self.reports.append(report)


def _limit_s(item: pytest.Item) -> float:
    """Return the seconds after which pytest-timeout ends a test; 0: never."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout") or 0)
    if not item.config.pluginmanager.has_plugin("timeout"):
        return 0.0
    return float(item.config.getini("timeout") or 0)


def _result(reports: list[pytest.TestReport]) -> Result:
    total = sum(report.duration for report in reports)
    failed = [report for report in reports if report.failed]
    if failed:
        return Result("failed", total, "\n".join(report.longreprtext for report in failed))
    skipped = [each for each in reports if each.skipped and not hasattr(each, "wasxfail")]
    if skipped:
        said = skipped[0].longrepr
        return Result("skipped", total, said[2] if isinstance(said, tuple) else str(said))
    return Result("passed", total)


def _next(pipe: Connection) -> str | None:
    try:
        name: str | None = pipe.recv()
    except EOFError:
        return None
    return name


def measure_cases(pipe: Connection) -> None:
    """Measure the items that the pipe names, until it ends."""
    from benchmarks.gpu.cases import ITEMS
    from benchmarks.gpu.record import plain

    pipe.send(Names({name: item.seconds for name, item in ITEMS.items()}, {}, {}))
    while (name := _next(pipe)) is not None:
        begin, text = time.perf_counter(), ""
        try:
            numbers = plain(ITEMS[name].measure())
        except Exception as error:  # one failing measurement must not cost the others
            text = traceback.format_exc()
            numbers = {"failed": f"{type(error).__name__}: {error}"}
        outcome = "failed" if text else "passed"
        pipe.send(Result(outcome, time.perf_counter() - begin, text, numbers))


def end_with_parent() -> None:
    """Kill this process and its session's group when the process that started it has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Serve one pipe."""
    end_with_parent()
    pipe, kind, *others = Connection(int(arguments[0])), *arguments[1:]
    if kind == "cases":
        measure_cases(pipe)
        return 0
    folder, marker = others
    options = ["-q", "-m", marker, "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["--continue-on-collection-errors", folder]
    return int(pytest.main(options, plugins=[_Told(pipe, folder)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
