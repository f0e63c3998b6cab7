"""Handlers of the Trainer's signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

import lightning.pytorch as pl


def note_sigterm(trainer: pl.Trainer) -> None:
    """Make the handler of SIGTERM only record the signal and forward the signal to the launcher's
    processes.

    Lightning's handler also broadcasts. In the middle of a step, a broadcast waits forever for
    ranks already waiting for this rank. Lightning's loops share the record before every batch.
    """
    # A partial can be pickled with the Trainer.
    vars(trainer._signal_connector)["_sigterm_notifier_fn"] = partial(_note_sigterm, trainer)


def _note_sigterm(trainer: pl.Trainer, signum: int, frame: FrameType | None) -> None:
    # Print may be under way.
    os.write(2, f"[rank: {trainer.global_rank}] Received SIGTERM: {signum}\n".encode())
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if launcher is not None and not connector.received_sigterm:
        launcher.kill(signum)
    connector.received_sigterm = True


def note_requeue(trainer: pl.Trainer, record: Callable[[int, FrameType | None], None]) -> None:
    """Make ``record`` the handler of Slurm's requeue signal in place of Lightning's own handler,
    which saves inside of the handler.
    """
    vars(trainer._signal_connector)["_slurm_sigusr_handler_fn"] = record


def ignore_after_run(trainer: pl.Trainer, signum: int) -> None:
    """Ignore a signal after the Trainer has restored the handlers from before the run."""
    trainer._signal_connector._original_handlers[signum] = signal.SIG_IGN
