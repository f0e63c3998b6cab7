"""Reports of tests on a GPU: they name it for ``benchmarks.gpu_tests``, and failures come at once,
since a run may be cut off.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
import torch


def facts_of_machine() -> list[tuple[str, str]]:
    """Return GPU, date and torch's version, in types of Python alone, which xdist can send."""
    date = datetime.now(timezone.utc).date().isoformat()
    gpu, version = torch.cuda.get_device_name(), torch.__version__
    return [(key, str(value)) for key, value in (("gpu", gpu), ("date", date), ("torch", version))]


@pytest.fixture(autouse=True)
def facts(request: pytest.FixtureRequest) -> None:
    """Note the machine in the report."""
    if torch.cuda.is_available():
        request.node.user_properties += facts_of_machine()


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
