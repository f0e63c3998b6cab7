"""What a run of the tests on a GPU says: its GPU in the report, for ``benchmarks.gpu_tests``, and
failures at once, since the run may be cut off."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def facts(request: pytest.FixtureRequest) -> None:
    """Note GPU, date and torch's version in the report."""
    if torch.cuda.is_available():
        date = datetime.now(timezone.utc).date().isoformat()
        request.node.user_properties += [
            ("gpu", torch.cuda.get_device_name()), ("date", date), ("torch", str(torch.__version__))
        ]  # fmt: skip


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
