"""Start the other ranks of this node by running the command again: ``python train.py``, ``python -m
package`` or a script.

The main process is rank 0 of its node. Under torchrun and Slurm every process exists already and
nothing is started.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.arguments import checked_arguments
from megatron_lightning.launch.failures import report_failure
from megatron_lightning.launch.hooks import LaunchHooks
from megatron_lightning.lightning_internals.processes import SubprocessScriptLauncher, share_threads
from megatron_lightning.resilience.exit_codes import FINISHED, INTERRUPTED
from megatron_lightning.resilience.failure import PeerFailure, end_process
from megatron_lightning.resilience.processes import (
    GRACE_S,
    LINGER_S,
    Child,
    ChildWatch,
    ParentWatch,
    kill,
    print_failure,
    wait_for,
)
from megatron_lightning.resilience.restart import restarts_in_process
from megatron_lightning.step.agreed_stop import AgreedStop

_STARTER_VARIABLE = "MEGATRON_LIGHTNING_STARTER_PID"
_JOIN_S = 60.0  # for the other ranks to finish the script after the main process has


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the current command once more for every other rank of this node.

    Args:
        environment: Knows the ranks and whether all processes exist.
        num_processes: Ranks of this node.
        num_nodes: Nodes of the job.
        hooks: Functions to call.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        hooks: LaunchHooks,
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._hooks = hooks
        self._watch: ChildWatch | None = None
        self._failed = False
        self._is_started = False  # by the main process, owner of the job's exit code
        self._interrupted = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"procs": [], "_watch": None}

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may use this launcher: only with a single process."""
        return self.num_processes * self.num_nodes == 1

    def _check_world(self) -> None:
        """Check the number of processes started by torchrun or Slurm against the Trainer's.

        Raises:
            ConfigError: If the numbers differ.
        """
        devices, nodes = self.num_processes, self.num_nodes
        try:
            self.cluster_environment.validate_settings(num_devices=devices, num_nodes=nodes)
        except ValueError as error:
            raise ConfigError(
                f"{error} The launcher has started its processes already. Set devices to the "
                "processes of a node (--nproc-per-node of torchrun, --ntasks-per-node of Slurm) "
                "and num_nodes to the nodes, or leave both out."
            ) from error

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other ranks unless an external launcher has, then call ``function`` in this
        rank.

        Raises:
            ConfigError: If the module or the command cannot be run this way. Raised before any
                process is started.
        """
        args, kwargs = checked_arguments(trainer, args, kwargs, self._hooks)
        self._check_world()
        # Popped, so that processes started by the user's code do not believe to be ranks.
        starter = os.environ.pop(_STARTER_VARIABLE, None)
        if starter is not None:
            self._is_started = True
            ParentWatch(int(starter), self._starter_ended, self._hooks.write_logs).start()
        elif (
            self.num_processes * self.num_nodes > 1
            and not self.cluster_environment.creates_processes_externally
        ):
            self._start()
        if self.num_processes > 1:
            # Each rank would otherwise use all cores of the node.
            share_threads(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Report this failure to the other ranks, before slow handlers of callbacks and loggers
        run.

        Raises:
            PeerFailure: If this rank fails only because another rank has failed.
        """
        watch = self._hooks.failure_watch()
        follows = report_failure(watch, error)
        self._failed = not (isinstance(error, AgreedStop) or restarts_in_process())
        self._interrupted = isinstance(error, KeyboardInterrupt)
        if isinstance(error, AgreedStop) and self._is_started:
            error.code = FINISHED
        if restarts_in_process():
            if follows:
                peer = PeerFailure(1)
                peer.is_final = watch is not None and watch.is_final
                raise peer from None
            return
        if watch is not None:
            # Collecting torch's objects takes a second. Other ranks would wait.
            compat.at_end_of_main_thread(gc.freeze)
        if self._watch is not None:
            self._watch.stop()  # this process exits by itself, and then ends the other processes
        if follows:
            if self.cluster_environment.creates_processes_externally:
                time.sleep(LINGER_S)
            raise PeerFailure(1) from None

    def kill(self, signum: Any) -> None:
        """Send a signal to the other ranks of this node. Ranks ended by the signal do not count as
        failures.

        Raises:
            SystemExit: With the code of an interruption after Ctrl-C: Lightning calls this last,
                and would exit with 1.
        """
        if self._watch is not None:
            self._watch.stop()
        # The other ranks are exiting already, since this rank reported the failure.
        if signum == signal.SIGKILL:
            wait_for(self._children(), GRACE_S)
        super().kill(signum)
        if self._interrupted and signum == signal.SIGKILL:
            raise SystemExit(INTERRUPTED)

    def _start(self) -> None:
        self._check_command()
        os.environ[_STARTER_VARIABLE] = str(os.getpid())
        try:
            self._call_children_scripts()
        finally:
            del os.environ[_STARTER_VARIABLE]
        end = partial(end_process, self._hooks.write_logs)
        self._watch = ChildWatch(self._children, self._child_failed, end=end)
        self._watch.start()
        compat.at_end_of_main_thread(partial(self._join, self._watch))

    def _check_command(self) -> None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if self.num_processes > 1 and spec is None and not os.path.isfile(sys.argv[0]):
            raise ConfigError(
                f"start_method='popen' runs the command again for each of the {self.num_processes} "
                f"local ranks, and {sys.argv[0]!r} is not a script file. Set start_method to "
                "'fork', or save the program as a file."
            )

    def _children(self) -> list[Child]:
        first = self.cluster_environment.node_rank() * self.num_processes
        return [
            Child(first + local_rank, process.pid, process.poll)
            for local_rank, process in enumerate(self.procs, 1)
        ]

    def _starter_ended(self, how: str) -> None:
        self._child_failed(self.cluster_environment.node_rank() * self.num_processes, how)

    def _child_failed(self, rank: int, how: str) -> None:
        """Report a failed process to the user and all ranks, unless a rank has reported the reason
        before the process ended.
        """
        watch = self._hooks.failure_watch()
        if watch is not None:
            watch.report_child(rank, how)
        elif not self._failed:
            print_failure(rank, how)

    def _join(self, watch: ChildWatch) -> None:
        """Wait until the other ranks finish the script. The end of this process would also end the
        other ranks.
        """
        children, failed = self._children(), self._failed
        wait_for(children, GRACE_S if failed else _JOIN_S)
        child_failed = watch.announce()
        kill(children)
        if child_failed and not failed:
            end_process(self._hooks.write_logs)  # with the exit code of a failure
