"""Starts of one run: the number of starts, the first step of each start, and the logs of each
start.

A start belongs to the run of the loaded checkpoint (``run_identity``). Rank 0 keeps the file
``starts.json`` in ``default_root_dir``, if a launcher may start the run again or the start is to
resume by itself (``ckpt_path="last"``, or Slurm's requeue). A launcher's restart without a
checkpoint also continues the record: a run that fails before its first save is counted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.errors import NoProgressError
from megatron_lightning.resilience.restart import is_restarted
from megatron_lightning.strategies.launch.csv_rows import CsvRows
from megatron_lightning.strategies.launch.run_identity import (
    is_run_in,
    new_run,
    run_of_checkpoint,
)
from megatron_lightning.strategies.launch.run_logs import (
    choose_versions,
    describe_loggers,
    hide_later_curves,
    open_logs,
)
from megatron_lightning.strategies.lightning_internals import (
    chosen_checkpoint,
    has_version,
    next_logged_step,
)
from megatron_lightning.strategies.progress import Progress

RECORD = "starts.json"
_SHARE_OF_BEATS = 0.01  # of the time, for notes of the reached step
_BEATS_S = (1.0, 10.0)  # least and most seconds between two notes
_STARTS_WITHOUT_PROGRESS = 3  # two restarts


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
        self._record: dict[str, Any] = {}
        self._path: Path | None = None
        self._next_beat_s = 0.0

    @property
    def number(self) -> int:
        """Starts of this run, the current one included. Known on rank 0 from the start of training
        on.
        """
        return len(self._record.get("starts", ()))

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
            choose_versions(self._free_loggers(trainer), _read(trainer).get("loggers", []))

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
        if not (resumes and (self._is_restart or _may_start_again())):
            return
        self._path = _path_of(trainer)
        starts = self._recorded_starts(trainer)
        starts.append(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "from_step": trainer.global_step,
                "reached_step": trainer.global_step,
                "automatic": _is_automatic(),
            }
        )
        run = self._progress.run
        self._record = {"run": run["id"], "starts": starts, "loggers": run["loggers"]}
        self._write()
        if len(starts) > 1:
            rank_zero_info(
                f"MegatronStrategy: start {len(starts)} of this run, from step "
                f"{trainer.global_step}; the one before reached step "
                f"{starts[-2]['reached_step']}."
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
        record = _read(trainer)
        is_same = self._resumes_run and record.get("run") == self._progress.run["id"]
        # Before its first checkpoint a run cannot be known by its id.
        is_repeated = self._is_restart and self._checkpoint is None and _is_automatic()
        return list(record.get("starts", [])) if is_same or is_repeated else []

    def beat(self, trainer: pl.Trainer) -> None:
        """Note the step reached by this start, every second, or less often on a slow disk."""
        begin_s = time.monotonic()
        if self._path is None or begin_s < self._next_beat_s:
            return
        self._record["starts"][-1]["reached_step"] = trainer.global_step
        self._write()
        end_s = time.monotonic()
        least, most = _BEATS_S
        self._next_beat_s = end_s + min(most, max(least, (end_s - begin_s) / _SHARE_OF_BEATS))

    def end(self, trainer: pl.Trainer) -> None:
        """Note the last step."""
        self._next_beat_s = float("-inf")
        self.beat(trainer)
        self._path = None

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._record, indent=1))
        os.replace(partial, self._path)


def check_progress(starts: list[dict[str, Any]]) -> None:
    """Check that the last starts have not all begun at the same step and ended at the same step.

    Raises:
        NoProgressError: If they have, and a launcher has started them.
    """
    last = starts[-_STARTS_WITHOUT_PROGRESS:]
    if len(last) < _STARTS_WITHOUT_PROGRESS or not all(s["automatic"] for s in last[1:]):
        return
    first, ended = last[0], last[:-1]  # the last start has only begun
    if all(s["from_step"] == first["from_step"] for s in last) and all(
        s["reached_step"] == first["reached_step"] for s in ended
    ):
        raise NoProgressError(
            f"this run was started {len(last)} times from step {first['from_step']} and ended at "
            f"step {first['reached_step']} each time: the failure repeats itself, as a bug does "
            "and a broken machine does not. Look at the first traceback of the last start; a start "
            "by hand counts anew."
        )


def _may_start_again() -> bool:
    """Return whether torchrun, Slurm or the process itself starts this run again."""
    elastic = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return is_restarted() or elastic or "SLURM_JOB_ID" in os.environ


def _is_automatic() -> bool:
    counts = (os.environ.get(n, "0") for n in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return is_restarted() or any(count != "0" for count in counts)


def _has_requeue(trainer: pl.Trainer) -> bool:
    root = str(trainer.default_root_dir)
    return not is_remote(root) and any(Path(root).glob("hpc_ckpt_*.ckpt"))


def _path_of(trainer: pl.Trainer) -> Path:
    return Path(str(trainer.default_root_dir)) / RECORD


def _read(trainer: pl.Trainer) -> dict[str, Any]:
    try:
        record = json.loads(_path_of(trainer).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
