"""How the ranks of one node come to life when neither torchrun nor Slurm started them.

``popen`` runs the user's command again for every further rank and watches the children: one that dies ends them all.
``spawn`` and ``fork`` start functions in child processes (notebooks, tests).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

if TYPE_CHECKING:
    from megatron_lightning.strategies.megatron import MegatronStrategy

StartMethod = Literal["popen", "spawn", "fork"]

_POLL_S = 0.5
_GRACE_S = 3.0
"""Time in which the ranks of a failed job may end by themselves, printing what they know."""


def make_launcher(strategy: MegatronStrategy) -> _Launcher | None:
    """Return the launcher for a strategy whose cluster environment is known; None where the ranks exist already."""
    environment = strategy.cluster_environment
    if environment is None or environment.creates_processes_externally or strategy.num_processes * strategy.num_nodes == 1:
        return _InProcessLauncher(strategy)
    if strategy.start_method == "popen":
        return WatchingLauncher(strategy)
    return _CheckedMultiProcessingLauncher(strategy, start_method=strategy.start_method)


class _InProcessLauncher(_Launcher):
    """Calls the function in this process, after the checks that need no process group."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Nothing is started, so a notebook is fine."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function``."""
        self._strategy.check_before_launch()
        return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """There are no children."""


class _CheckedMultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, after the checks that need no process group."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks, each of which calls ``function``."""
        self._strategy.check_before_launch()  # type: ignore[attr-defined]
        return super().launch(function, *args, trainer=trainer, **kwargs)


class WatchingLauncher(_SubprocessScriptLauncher):
    """Runs the user's command again for each local rank, and ends the job when one of them dies.

    Args:
        strategy: Tells sizes, and checks the configuration before anything is started.
    """

    def __init__(self, strategy: MegatronStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call ``function`` as rank 0 of this node."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._strategy.check_before_launch()
        if not self.cluster_environment.creates_processes_externally and not self.procs:
            self._call_children_scripts()
            first_rank = self._strategy.node_rank * self.num_processes + 1
            threading.Thread(target=_watch, args=(self.procs, first_rank), name="megatron-children", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def _watch(children: Sequence[subprocess.Popen[bytes]], first_rank: int) -> None:
    """Poll the children until all have ended well, or one has not: then end this process and the others."""
    while any(child.returncode is None for child in children):
        for index, child in enumerate(children):
            if child.poll() not in (None, 0):
                _end_job(children, f"rank {first_rank + index} (process {child.pid}) {_how(child.returncode)}")
        time.sleep(_POLL_S)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end_job(children: Sequence[subprocess.Popen[bytes]], reason: str) -> None:
    print(f"megatron-lightning: {reason}; ending the job.", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.1)
    for child in children:
        if child.poll() is None:
            child.kill()
    os._exit(1)  # the main thread may be waiting in a collective for the rank that is gone
