"""Starts of one run: the number of starts, the first step of each start, and the logs of each
start.

A start belongs to the run of the loaded checkpoint (``run_identity``). Rank 0 keeps the record
(``start_record``) in ``default_root_dir``, if a launcher may start the run again or the start is to
resume by itself (``ckpt_path="last"``, or Slurm's requeue). A launcher's restart without a
checkpoint also continues the record: a run that fails before its first save is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.checkpoint.run_identity import is_run_in, new_run, run_of_checkpoint
from megatron_lightning.launch.run_logs import (
    choose_versions,
    describe_loggers,
    hide_later_curves,
    open_logs,
)
from megatron_lightning.lightning_internals.checkpoints import chosen_checkpoint
from megatron_lightning.lightning_internals.logs import has_version
from megatron_lightning.lightning_internals.loops import next_logged_step
from megatron_lightning.resilience.lifecycle.csv_rows import CsvRows
from megatron_lightning.resilience.lifecycle.start_record import (
    StartRecord,
    check_progress,
    is_automatic,
    may_start_again,
    read_record,
)
from megatron_lightning.step.progress import Progress


class Starts:
    """Record of the starts of a run. Belongs to the strategy, and can be pickled with the
    strategy.

    Args:
        progress: The strategy's. Holds the run.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._is_restart = False
        self._resumes_run = False
        self._path_given = ""  # ckpt_path
        self._checkpoint: str | None = None  # to be loaded. Known on rank 0
        self._versionless: list[int] = []  # loggers with a free choice
        self._earlier_rows: list[CsvRows] = []
        self._record: StartRecord | None = None  # while a start is recorded
        self._number = 0

    @property
    def number(self) -> int:
        """Starts of this run, the current one included. Known on rank 0 from the start of training
        on.
        """
        return self._number

    def prepare(
        self, trainer: pl.Trainer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Look for the checkpoints of a ``fit`` that resumes by itself in the folder of the last
        start's log, where Lightning keeps them by default. Called before ranks exist.
        """
        path = kwargs.get("ckpt_path", next((a for a in args if isinstance(a, str)), None))
        fits = trainer.state.fn == TrainerFn.FITTING
        self._versionless = [
            index for index, logger in enumerate(trainer.loggers) if not has_version(logger)
        ]
        self._is_restart = fits and (
            path in ("last", "hpc") or (path is None and _has_requeue(trainer))
        )
        if self._is_restart:
            choose_versions(
                self._free_loggers(trainer), read_record(_folder(trainer)).get("loggers", [])
            )

    def note_checkpoint(self, path: str) -> None:
        """Note the ``ckpt_path`` of the call, empty if left out. Called before ranks exist."""
        self._path_given = path

    def open_logs(self, trainer: pl.Trainer, broadcast: Callable[[Any], Any]) -> None:
        """Decide to which run this fit belongs, and open the loggers' logs. All ranks call this,
        before Lightning opens the logs.

        Args:
            trainer: The Trainer.
            broadcast: Returns rank 0's value on every rank.
        """
        fits = trainer.state.fn == TrainerFn.FITTING
        is_first = trainer.is_global_zero
        if fits:
            run, self._resumes_run = broadcast(self._chosen_run(trainer) if is_first else None)
            free_loggers = self._free_loggers(trainer)
            choose_versions(free_loggers, run["loggers"] if self._resumes_run else [])
            self._progress.run = run
        if not is_first:
            return
        resumes = fits and self._checkpoint is not None
        self._earlier_rows = open_logs(trainer.loggers, resumes=resumes)
        if fits:
            self._progress.run = {**run, "loggers": describe_loggers(trainer.loggers)}

    def _chosen_run(self, trainer: pl.Trainer) -> tuple[Mapping[str, Any], bool]:
        """Return the run of this fit, and whether the fit resumes the run."""
        root = str(trainer.default_root_dir)
        self._checkpoint = path = chosen_checkpoint(trainer, self._path_given)
        saved = {} if path is None else run_of_checkpoint(path)
        own = self._progress.run  # of an earlier fit with this strategy
        resumes = is_run_in(saved, root) and own.get("id", saved.get("id")) == saved["id"]
        if path is not None and not resumes and not own:
            of = f"run {saved['id']} in {saved['root']}" if "id" in saved else "an unknown run"
            rank_zero_info(
                f"MegatronStrategy: {path} is of {of}; this start is a new run, with new logs, in "
                f"{root}."
            )
        return own or (saved if resumes else new_run(root)), resumes

    def _free_loggers(self, trainer: pl.Trainer) -> list[Any]:
        return [trainer.loggers[index] for index in self._versionless]

    def begin(self, trainer: pl.Trainer) -> None:
        """Record this start and continue the logs of the run. Called when training starts.

        Raises:
            NoProgressError: If a launcher starts this run again and again without progress.
        """
        if not trainer.is_global_zero:
            return
        self._continue_logs(trainer)
        is_local = not is_remote(str(trainer.default_root_dir))
        resumes = is_local and bool(trainer.checkpoint_callbacks)
        # Only runs that may be started again keep a record beside the logs.
        if not (resumes and (self._is_restart or may_start_again())):
            return
        run, step = self._progress.run, trainer.global_step
        self._record = StartRecord(
            _folder(trainer),
            self._recorded_starts(trainer),
            step,
            run=run["id"],
            loggers=run["loggers"],
        )
        starts = self._record.starts
        self._number = len(starts)
        if len(starts) > 1:
            rank_zero_info(
                f"MegatronStrategy: start {len(starts)} of this run, from step {step}; the one "
                f"before reached step {starts[-2]['reached_step']}."
            )
        check_progress(starts)

    def _continue_logs(self, trainer: pl.Trainer) -> None:
        """Continue the logs at the first step of this start. Steps after the checkpoint are logged
        again.
        """
        step = next_logged_step(trainer)
        for rows in self._earlier_rows:
            file = rows.put_behind(step)
            if file is not None:
                rank_zero_info(
                    f"MegatronStrategy: logs continue at step {step}; rows of later steps, of an "
                    f"earlier start, are now in {file}."
                )
        self._earlier_rows = []
        hide_later_curves(trainer.loggers, step)

    def _recorded_starts(self, trainer: pl.Trainer) -> list[dict[str, Any]]:
        record = read_record(_folder(trainer))
        is_same = self._resumes_run and record.get("run") == self._progress.run["id"]
        # Before its first checkpoint a run cannot be known by its id.
        is_repeated = self._is_restart and self._checkpoint is None and is_automatic()
        return list(record.get("starts", [])) if is_same or is_repeated else []

    def beat(self, trainer: pl.Trainer) -> None:
        """Note the step reached by this start, at most every second."""
        if self._record is not None:
            self._record.beat(trainer.global_step)

    def end(self, trainer: pl.Trainer) -> None:
        """Note the last step."""
        if self._record is not None:
            self._record.note(trainer.global_step)
        self._record = None


def _has_requeue(trainer: pl.Trainer) -> bool:
    root = str(trainer.default_root_dir)
    return not is_remote(root) and any(Path(root).glob("hpc_ckpt_*.ckpt"))


def _folder(trainer: pl.Trainer) -> Path:
    return Path(str(trainer.default_root_dir))
