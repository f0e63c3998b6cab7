"""Start the other ranks of this node, and let none outlive another's failure.

``popen``: the running command is started again for every other local rank (``python train.py``, ``python -m package`` or a
console script); the main process is rank 0 of its node. ``spawn`` and ``fork``: the ranks are workers of this process, which is
none of them. Under torchrun and Slurm every process exists already and nothing is started. In each case the starter watches
its processes, and each process watches its starter.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessException

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies.failure import PeerFailure, end_process
from megatron_lightning.strategies.last import check_named, with_last_found
from megatron_lightning.strategies.lightning_internals import MultiProcessingLauncher, SubprocessScriptLauncher, share_threads

if TYPE_CHECKING:
    from megatron_lightning.strategies.environment import MegatronEnvironment

StartMethod = Literal["popen", "spawn", "fork"]

_STARTER_VARIABLE = "MEGATRON_LIGHTNING_STARTER_PID"
_POLL_S = 0.2
_GRACE_S = 3.0  # for processes to meet their own errors or to be ended by their watches, and to write what they hold
_JOIN_S = 60.0  # for the other ranks to finish the script after the main process has
_LINGER_S = 0.5  # by which a rank that ends because of another one outlives that one, whom a starter then takes for the cause
_INTERRUPTED = 128 + signal.SIGINT  # exit code of a worker that SIGINT reached, as shells have it


@dataclass(frozen=True)
class Child:
    """One started process."""

    rank: int
    """Its global rank."""
    pid: int
    """Its process id."""
    exit_code: Callable[[], int | None]
    """Its exit code; minus the signal that killed it; None while it runs."""

    def describe_end(self, code: int) -> str:
        """Say how the process ended."""
        if code == _INTERRUPTED:
            return f"its process {self.pid} was interrupted (Ctrl-C or SIGINT)"
        if code >= 0:
            return f"its process {self.pid} ended with exit code {code}"
        return f"its process {self.pid} was killed by {signal.Signals(-code).name}"


def wait_for(children: Sequence[Child], seconds: float) -> None:
    """Wait until all ``children`` have ended, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(child.exit_code() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)


def kill(children: Sequence[Child]) -> None:
    """End ``children`` at once: inside a collective a process cannot answer anything milder."""
    for child in children:
        if child.exit_code() is None:
            os.kill(child.pid, signal.SIGKILL)
    wait_for(children, _GRACE_S)


class ChildWatch(threading.Thread):
    """Ends all children when one of them fails.

    Args:
        children: Returns the processes to watch; empty as long as none is started.
        on_failure: Called once with the failed rank and how it ended, before the others are ended; says so to the user.
        end: Called last, to end this process as well unless the watch was stopped; None: it is no rank.
    """

    def __init__(
        self,
        children: Callable[[], Sequence[Child]],
        on_failure: Callable[[int, str], None],
        *,
        end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name="child-watch", daemon=True)
        self._children, self._on_failure, self._end = children, on_failure, end
        self._stopped, self._announced = threading.Event(), threading.Lock()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def run(self) -> None:
        """Look every fifth of a second until all have ended well or one has failed."""
        while not self._stopped.wait(_POLL_S):
            children = self._children()
            if self.announce():
                deadline = time.monotonic() + _GRACE_S
                wait_for(children, _GRACE_S)
                kill(children)
                # The main thread may be about to meet the same error, or wait in a collective for the rank that is gone.
                if self._end is not None and not self._stopped.wait(max(0.0, deadline - time.monotonic())):
                    self._end()
                return
            if children and all(child.exit_code() == 0 for child in children):
                return

    def announce(self) -> bool:
        """Tell of the child that failed, once; return whether there is one.

        Of several, one that a signal killed or interrupted is the cause: the others lost it and raised. SIGTERM alone
        is a consequence: workers get it when another one has failed.
        """
        ended = [(child, child.exit_code()) for child in self._children()]
        failed = [(child, code) for child, code in ended if code]
        failed.sort(key=lambda end: (end[1] == -signal.SIGTERM, end[1] > 0 and end[1] != _INTERRUPTED))
        if failed and self._announced.acquire(blocking=False):
            child, code = failed[0]
            self._on_failure(child.rank, child.describe_end(code))
        return bool(failed)


def print_failure(rank: int, how: str) -> None:
    """Say which rank failed."""
    print(f"megatron_lightning: rank {rank} failed: {how}; ending the job", file=sys.stderr, flush=True)


class ParentWatch(threading.Thread):
    """Ends this process when the process that started it has ended.

    Args:
        parent_pid: Process id of the starter.
        on_end: Called with how the starter ended, before this process ends.
        write_logs: Called at the end of this process.
    """

    def __init__(self, parent_pid: int, on_end: Callable[[str], None], write_logs: Callable[[], None]) -> None:
        super().__init__(name="parent-watch", daemon=True)
        self._parent_pid, self._on_end, self._write_logs = parent_pid, on_end, write_logs

    def run(self) -> None:
        """Look every fifth of a second."""
        while os.getppid() == self._parent_pid:
            time.sleep(_POLL_S)
        self._on_end(f"process {self._parent_pid}, which started this one ({os.getpid()}), has ended")
        end_process(self._write_logs)


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the current command once more for every other rank of this node.

    Args:
        strategy: Gives the cluster environment, the sizes, and the checks that come before any process is started.
    """

    def __init__(self, strategy: MegatronEnvironment) -> None:
        environment = strategy.cluster_environment
        if environment is None:
            raise ConfigError("the strategy has no cluster environment. Give it to a Trainer before it is used.")
        super().__init__(environment, max(1, strategy.num_processes), strategy.num_nodes)
        self._strategy = strategy
        self._watch: ChildWatch | None = None
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"procs": [], "_watch": None}

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may use it: only if there is nothing to start."""
        return self.num_processes * self.num_nodes == 1

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks if nobody has, then call ``function`` in this one.

        Raises:
            ConfigError: If the module or the command cannot be run this way; before any process is started.
        """
        args, kwargs = with_last_found(trainer, args, kwargs)
        check_named(args, kwargs)
        self._strategy.check_before_launch(trainer, _data_module(args, kwargs))
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        starter = os.environ.pop(_STARTER_VARIABLE, None)
        if starter is not None:
            ParentWatch(int(starter), self._starter_ended, self._strategy.write_logs).start()
        elif self.num_processes * self.num_nodes > 1 and not self.cluster_environment.creates_processes_externally:
            self._start()
        if self.num_processes > 1:
            share_threads(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Let the other ranks know that this one fails, before callbacks and loggers take their time over it.

        Raises:
            PeerFailure: If it fails because another rank has.
        """
        watch = self._strategy.failure_watch
        follows = watch is not None and watch.report(error) and not isinstance(error, KeyboardInterrupt)
        self._failed = True
        if watch is not None:
            compat.at_end_of_main_thread(gc.freeze)  # taking torch apart takes a second, for which the others would wait
        if self._watch is not None:
            self._watch.stop()  # this process has a way out of its own; at its end the others are ended
        if follows:
            if self.cluster_environment.creates_processes_externally:
                time.sleep(_LINGER_S)
            raise PeerFailure(1) from None

    def kill(self, signum: Any) -> None:
        """Send a signal to the other ranks of this node; those are no failures that would end this process."""
        if self._watch is not None:
            self._watch.stop()
        if signum == signal.SIGKILL:  # they are on their way out since this one told them why
            wait_for(self._children(), _GRACE_S)
        super().kill(signum)

    def _start(self) -> None:
        self._check_command()
        os.environ[_STARTER_VARIABLE] = str(os.getpid())
        try:
            self._call_children_scripts()
        finally:
            del os.environ[_STARTER_VARIABLE]
        end = partial(end_process, self._strategy.write_logs)
        self._watch = ChildWatch(self._children, self._child_failed, end=end)
        self._watch.start()
        compat.at_end_of_main_thread(partial(self._join, self._watch))

    def _check_command(self) -> None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if self.num_processes > 1 and spec is None and not os.path.isfile(sys.argv[0]):
            raise ConfigError(
                f"start_method='popen' runs the command again for each of the {self.num_processes} local ranks, and "
                f"{sys.argv[0]!r} is not a script file. Set start_method to 'fork' or 'spawn', or start with torchrun."
            )

    def _children(self) -> list[Child]:
        first = self.cluster_environment.node_rank() * self.num_processes
        return [Child(first + local_rank, process.pid, process.poll) for local_rank, process in enumerate(self.procs, 1)]

    def _starter_ended(self, how: str) -> None:
        self._child_failed(self.cluster_environment.node_rank() * self.num_processes, how)

    def _child_failed(self, rank: int, how: str) -> None:
        """Tell the user and all ranks, unless a rank has reported why before it ended."""
        watch = self._strategy.failure_watch
        if watch is not None:
            watch.report_child(rank, how)
        elif not self._failed:
            print_failure(rank, how)

    def _join(self, watch: ChildWatch) -> None:
        """Let the other ranks finish the script; they would be ended as soon as this process is gone."""
        children, failed = self._children(), self._failed
        wait_for(children, _GRACE_S if failed else _JOIN_S)
        child_failed = watch.announce()
        kill(children)
        if child_failed and not failed:
            end_process(self._strategy.write_logs)  # with an exit code that says so


class WorkerLauncher(MultiProcessingLauncher):
    """Runs every rank of this node as a worker process, which also works in a notebook (``fork``) and under pytest.

    Args:
        strategy: Gives the number of ranks and the checks that come before any process is started.
        start_method: ``"spawn"`` or ``"fork"``.
    """

    _strategy: MegatronEnvironment

    def __init__(self, strategy: MegatronEnvironment, start_method: Literal["spawn", "fork"]) -> None:
        super().__init__(strategy, start_method)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the workers, wait for them, and return what rank 0 returned.

        Raises:
            ConfigError: If the module cannot be run this way; before any process is started.
            torch.multiprocessing.ProcessRaisedException: With a worker's traceback.
            torch.multiprocessing.ProcessExitedException: For a worker that was killed.
            KeyboardInterrupt: If this process or a worker was interrupted.
        """
        args, kwargs = with_last_found(trainer, args, kwargs)
        check_named(args, kwargs)
        self._strategy.check_before_launch(trainer, _data_module(args, kwargs))
        self.procs, others = [], set(multiprocessing.active_children())
        watch = ChildWatch(self._children, print_failure)
        watch.start()
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessException as error:
            watch.announce()  # torch was faster than the watch
            if getattr(error, "exit_code", None) == _INTERRUPTED:
                raise KeyboardInterrupt from None
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                wait_for(self._children(), _GRACE_S)  # Ctrl-C reached them too
            for child in set(multiprocessing.active_children()) - others:  # the launcher knows none before all are started
                child.kill()
                child.join()
            raise
        finally:
            watch.stop()
            watch.join()

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """Hand the weights of all ranks to the process that started them, not those of its first worker alone."""
        output = super()._collect_rank_zero_results(trainer, results)
        if trainer.state.fn == TrainerFn.FITTING:
            whole = self._strategy.whole_module_state(str(trainer.default_root_dir))
            if whole is not None and output is not None and output.weights_path is not None:
                self._strategy.checkpoint_io.save_checkpoint(whole, output.weights_path)
        return output

    def _children(self) -> list[Child]:
        return [Child(rank, process.pid, _exit_code_of(process)) for rank, process in enumerate(self.procs) if process.pid]

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        def say(how: str) -> None:
            print(f"megatron_lightning: {how}", file=sys.stderr, flush=True)

        ParentWatch(os.getppid(), say, self._strategy.write_logs).start()
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except BaseException as error:  # the Trainer's own handling of it stays in the process that started this one
            watch, interrupted = self._strategy.failure_watch, isinstance(error, KeyboardInterrupt)
            if watch is not None:
                follows = watch.report(error) and not interrupted
                self._strategy.write_logs()
                watch.abort()
                compat.at_end_of_main_thread(gc.freeze)  # as in ScriptLauncher
                if follows:
                    time.sleep(_LINGER_S)
                    raise PeerFailure(1) from None
            if interrupted:
                raise SystemExit(_INTERRUPTED) from None  # torch would let it end as if all had gone well
            raise


def _exit_code_of(process: BaseProcess) -> Callable[[], int | None]:
    """Return a function that reads a worker's exit code and leaves the worker for the main thread to collect."""

    def exit_code() -> int | None:
        try:
            status = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return process.exitcode  # the main thread has collected it
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    return exit_code


def _data_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> pl.LightningDataModule | None:
    """Return the data module among the arguments of ``fit`` and its kin; the Trainer knows it only after the launch."""
    given = (*args, *kwargs.values())
    return next((argument for argument in given if isinstance(argument, pl.LightningDataModule)), None)


def make_launcher(strategy: MegatronEnvironment) -> ScriptLauncher | WorkerLauncher:
    """Return the launcher for ``strategy.start_method``; the processes of torchrun and Slurm are taken as they are."""
    environment = strategy.cluster_environment
    external = environment is not None and environment.creates_processes_externally
    alone = max(1, strategy.num_processes) * strategy.num_nodes == 1
    if strategy.start_method == "popen" or external or alone:
        return ScriptLauncher(strategy)
    return WorkerLauncher(strategy, strategy.start_method)
