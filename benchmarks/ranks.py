"""Run a function on several ranks of one machine."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def _rank_main(
    body: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    store: str,
    pipe: Connection,
    limit_s: float,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
    )
    try:
        if size > 1:
            os.environ.update(
                TORCHELASTIC_RUN_ID="coverage",
                GROUP_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT="29500",
            )
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=max(60.0, limit_s / 2)),
            )
        pipe.send((True, body(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # closes the connections, so that the peers fail at once instead of waiting


def run(size: int, body: Callable[..., Any], *args: Any, limit_s: float) -> list[Any]:
    """Run ``body`` on ``size`` forked ranks, and return their results.

    Raises:
        RuntimeError: With the first error of a rank, ours before others', or at the limit.
    """
    context, deadline, errors, results = mp.get_context("fork"), time.monotonic() + limit_s, [], []
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(body, args, rank, size, f"{folder}/store", sender, limit_s),
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        for _, receiver in ranks:
            try:
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                succeeded, value = receiver.recv()
            except EOFError:
                succeeded, value = False, f"no result within {limit_s:.0f} s, or the rank died"
            (results if succeeded else errors).append(value)
        for process, receiver in ranks:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            receiver.close()
    if errors:
        raise RuntimeError(min(errors, key=lambda text: "megatron_lightning.errors." not in text))
    return results
