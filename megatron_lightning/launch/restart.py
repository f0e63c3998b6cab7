"""Start a run again in the same processes after an exception, with everything made anew."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning import compat
from megatron_lightning.errors import EXPLAINED, SpikeError
from megatron_lightning.lightning_internals.trainer import refuses_settings
from megatron_lightning.resilience.connections import cut_connections
from megatron_lightning.resilience.exit_codes import FAILED
from megatron_lightning.resilience.failure import PeerFailure, replace_traceback
from megatron_lightning.resilience.restart import Meeting, Restarts, attempt_in_process

MakeRun = Callable[[], Any]


def run_with_restarts(make_run: MakeRun, restarts: Restarts | None = None) -> Any:
    """Call ``make_run()`` on every rank, and again after an exception on any rank.

    ``make_run`` creates *everything* anew, Trainer, strategy, module, data module, callbacks and
    loggers, and either fits or returns a function for fitting. ``ckpt_path="last"`` makes each run
    continue from the newest checkpoint or local copy:

        def make_run():
            trainer = Trainer(strategy=MegatronStrategy(...), callbacks=[ModelCheckpoint(...)])
            return partial(trainer.fit, MyModule(), MyData(), ckpt_path="last")

        run_with_restarts(make_run, Restarts(in_process=3))

    A failing rank cuts its connections, and so wakes other ranks waiting in a collective. All ranks
    leave the run, destroy the process groups, meet, and start again. An error about settings, a
    stop on request and Ctrl-C end the job. A killed process also ends the job: all other processes
    end, and torchrun, Slurm or another launcher starts the job again.

    Args:
        make_run: The factory.
        restarts: Number of restarts. None: no restarts.

    Returns:
        Result of the last run.
    """
    limit, stores = (restarts or Restarts()).in_process, list[compat.Store | None]()
    for attempt in range(limit + 1):
        is_last = attempt == limit
        with attempt_in_process(attempt, is_last=is_last):
            try:
                run = make_run()
                return run() if callable(run) else run
            except BaseException as error:
                begin_s, has_ranks = time.monotonic(), dist.is_initialized()
                if is_last or not _is_transient(error):
                    if has_ranks:
                        with suppress(RuntimeError):  # the store has ended
                            Meeting(compat.held_store(), attempt, 0).cancel()
                    raise
                if has_ranks:
                    # Without an agent, rank 0 serves the store until the last reference ends.
                    stores.append(_leave(attempt))
                    if stores[-1] is None:  # a process is gone
                        replace_traceback(error)
                        raise SystemExit(FAILED) from None
                error.__traceback__ = None  # frames of the traceback hold the failed run
                what = type(error).__name__
            run = None
            gc.collect()
        rank_zero_info(
            f"megatron_lightning: restart {attempt + 1} of {limit} in these processes after "
            f"{what}; all ranks met after {time.monotonic() - begin_s:.1f} s."
        )
    return None


def _is_transient(error: BaseException) -> bool:
    """Return whether another run may go well."""
    if isinstance(error, PeerFailure):
        return not error.is_final
    if isinstance(error, (*EXPLAINED, SpikeError)) or refuses_settings(error):
        return False
    return isinstance(error, Exception)  # no stop on request, no Ctrl-C


def _leave(attempt: int) -> compat.Store | None:
    """Leave a failed run: destroy the process groups and meet the other ranks.

    Returns:
        The job's store, to be kept until the next run has connected. None: not all came.
    """
    store, world_size = compat.held_store(), dist.get_world_size()
    meeting = Meeting(store, attempt, world_size)
    cut_connections(int(os.environ["MASTER_PORT"]))
    compat.destroy_process_groups()
    with suppress(RuntimeError):  # the store has ended
        return store if meeting.wait() else None
    return None
