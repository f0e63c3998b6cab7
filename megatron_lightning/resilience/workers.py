"""Worker processes, one per rank, of a starter without a rank: started, watched, and ended
together.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from torch.multiprocessing.spawn import ProcessException, start_processes

from megatron_lightning.resilience.exit_codes import INTERRUPTED
from megatron_lightning.resilience.failure import print_message
from megatron_lightning.resilience.processes import (
    GRACE_S,
    Child,
    ChildWatch,
    ParentWatch,
    print_failure,
    wait_for,
)


def run_workers(function: Callable[..., object], args: tuple[Any, ...], num_workers: int) -> None:
    """Call ``function(rank, *args)`` in spawned processes, and wait for all processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With a worker's traceback.
        torch.multiprocessing.ProcessExitedException: For a killed worker.
        KeyboardInterrupt: If this process or a worker was interrupted.
    """
    processes: list[BaseProcess] = []
    with watched_workers(lambda: processes):
        context = start_processes(_work, (function, *args), nprocs=num_workers, join=False)  # type: ignore[no-untyped-call]
        processes += context.processes
        while not context.join():
            pass


def _work(rank: int, function: Callable[..., object], *args: Any) -> None:
    with worker_process():
        function(rank, *args)


@contextmanager
def watched_workers(
    processes: Callable[[], Sequence[BaseProcess]],
    on_failure: Callable[[int, str], None] = print_failure,
) -> Iterator[None]:
    """Watch workers while a block starts workers through torch and waits.

    After a failure, the failed rank and the failure are printed, and all other workers are ended.
    If the block raises, all workers are ended.

    Args:
        processes: Returns the workers by rank. Empty before the start.
        on_failure: Called once with the failed rank and a description of the end.

    Raises:
        KeyboardInterrupt: If a worker was interrupted.
    """

    def children() -> list[Child]:
        return [
            Child(rank, process.pid, _exit_code_of(process))
            for rank, process in enumerate(processes())
            if process.pid
        ]

    other_children = set(multiprocessing.active_children())
    watch = ChildWatch(children, on_failure)
    watch.start()
    try:
        yield
    except ProcessException as error:
        watch.announce()  # torch was faster than the watch
        if getattr(error, "exit_code", None) == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            wait_for(children(), GRACE_S)  # Ctrl-C reached the workers, too
        # Processes() is empty before all are started.
        for child in set(multiprocessing.active_children()) - other_children:
            child.kill()
            child.join()
        raise
    finally:
        watch.stop()
        watch.join()


@contextmanager
def worker_process(write_logs: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run a block as a worker. The worker ends together with the starter, after ``write_logs``, and
    with ``INTERRUPTED`` on Ctrl-C.
    """
    ParentWatch(os.getppid(), print_message, write_logs).start()
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # torch would end the worker with exit code 0


def _exit_code_of(process: BaseProcess) -> Callable[[], int | None]:
    """Return a function to read a worker's exit code without reaping the worker: the main thread
    reaps.
    """

    def exit_code() -> int | None:
        try:
            status = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return process.exitcode  # reaped
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    return exit_code
