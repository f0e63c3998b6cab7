"""Run a test body on several ranks, in processes of a fork server that has torch loaded (0.2 s a
test; spawn costs 10 s)."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "lightning.pytorch",
    "pytest",
    "tests.helpers.preload",
]


@lru_cache(maxsize=1)
def _fork_server() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _rank_main(
    body: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    pipe: Connection,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    faulthandler.register(
        signal.SIGUSR1, file=os.open(_stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size)
    )
    try:
        if size > 1:
            file_store = dist.FileStore(f"{folder}/store", size)
            dist.init_process_group(
                "gloo",
                store=file_store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            # A body without collectives would end while a peer still connects to this rank.
            dist.barrier()
        result = body(*args)
        # Plain pickles hold the values of tensors; a pipe's own would share memory with a rank that
        # may have ended before they are read.
        pipe.send_bytes(pickle.dumps((True, result)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # closes the connections, so that the peers fail at once instead of waiting


def _stacks_file(folder: str, rank: int) -> str:
    return f"{folder}/stacks-{rank}"


def _stacks(process: BaseProcess, folder: str, rank: int) -> str:
    """Return where every thread of a rank stands; the rank writes it from a signal handler, in
    whatever call it hangs."""
    stacks = Path(_stacks_file(folder, rank))
    if process.pid is None or not process.is_alive() or not stacks.exists():
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while not stacks.stat().st_size and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)  # to the end of what it writes
    return stacks.read_text()


def run_ranks(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run ``body(*args)`` on ``size`` ranks with a default gloo process group (none for one rank).

    Args:
        size: Number of ranks.
        body: A module-level function; arguments and result are pickled.
        args: Passed to every rank; the rank is ``torch.distributed.get_rank()``.
        timeout_s: Limit of the whole run.

    Returns:
        The results by rank.

    Raises:
        AssertionError: With the traceback of every rank that failed, and the stacks of every rank
            that gave no result.
    """
    context = _fork_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(body, rank, size, folder, sender, args, timeout_s)
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        deadline, results, errors = time.monotonic() + timeout_s, [None] * size, []
        try:
            for rank, (process, receiver) in enumerate(ranks):
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    errors.append(
                        f"rank {rank}: no result after {timeout_s} "
                        f"s\n{_stacks(process, folder, rank)}"
                    )
                    continue
                try:
                    succeeded, value = receiver.recv()
                except EOFError:
                    process.join(1)
                    errors.append(f"rank {rank}: died with exit code {process.exitcode}")
                    continue
                if succeeded:
                    results[rank] = value
                else:
                    errors.append(f"rank {rank}:\n{value}")
        finally:
            for process, receiver in ranks:
                process.join(0.2 if errors else 5)
                if process.is_alive():
                    process.kill()
                    process.join()
                receiver.close()
        if errors:
            raise AssertionError("\n".join(errors))
        return results
