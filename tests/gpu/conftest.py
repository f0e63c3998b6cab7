"""What a run of the tests on a GPU says, also if it is cut off: ``benchmarks.gpu_tests`` reads
it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
import torch


def pytest_report_header() -> str | None:
    """Return the line of the GPU, the date and torch's version."""
    if not torch.cuda.is_available():
        return None
    date = datetime.now(timezone.utc).date().isoformat()
    return f"GPU: {torch.cuda.get_device_name()}; {date}; torch {torch.__version__}"


class _AtOnce:
    """Prints failures when they happen."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print what a test that fails says."""
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print failures at once, in the process that prints."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_AtOnce(terminal), "failures-at-once")
