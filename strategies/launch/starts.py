"""Starts of one run: the number of starts, the first step of each start, and the logs of each
start.

Rank 0 keeps the file ``starts.json`` in ``default_root_dir``, if a launcher may start the run again
or the start is a restart. A start from a checkpoint found by
Lightning itself (``ckpt_path="last"``, or Slurm's requeue) is a restart of the same run. Any other
start begins a new record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.errors import NoProgressError
from megatron_lightning.resilience.restart import is_restarted
from megatron_lightning.strategies.launch.run_logs import (
    describe_loggers,
    drop_later_rows,
    resume_logs,
)
from megatron_lightning.strategies.lightning_internals import next_logged_step

RECORD = "starts.json"
_BEAT_S = 10.0  # between two notes of the reached step
_STARTS_WITHOUT_PROGRESS = 3  # two restarts


class Starts:
    """Record of the starts of a run. Belongs to the strategy, and can be pickled with the
    strategy.
    """

    def __init__(self) -> None:
        self._is_restart = False
        self._record: dict[str, Any] = {}
        self._path: Path | None = None
        self._beat_s = 0.0

    @property
    def number(self) -> int:
        """Starts of this run, the current one included. Known on rank 0 from the start of training
        on.
        """
        return len(self._record.get("starts", ()))

    def prepare(
        self, trainer: pl.Trainer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Continue the logs of the run resumed by a ``fit``. Called before loggers create
        anything.
        """
        path = kwargs.get("ckpt_path", next((a for a in args if isinstance(a, str)), None))
        fits = trainer.state.fn == TrainerFn.FITTING
        self._is_restart = fits and (
            path in ("last", "hpc") or (path is None and _has_requeue(trainer))
        )
        if not fits or (path is None and not self._is_restart):
            return
        recorded = _read(trainer).get("loggers", []) if self._is_restart else []
        strategy = trainer.strategy
        is_first = all(getattr(strategy, name, 0) == 0 for name in ("local_rank", "node_rank"))
        resume_logs(trainer.loggers, recorded, is_first_rank=is_first)

    def begin(self, trainer: pl.Trainer) -> None:
        """Record this start and continue the logs of the run. Called when training starts.

        Raises:
            NoProgressError: If a launcher starts this run again and again without progress.
        """
        if not trainer.is_global_zero:
            return
        # Rows logged after the checkpoint are logged again from here.
        drop_later_rows(trainer.loggers, next_logged_step(trainer))
        is_local = not is_remote(str(trainer.default_root_dir))
        resumes = is_local and bool(trainer.checkpoint_callbacks)
        # Only runs that may be started again keep a record beside the logs.
        if not (resumes and (self._is_restart or _may_start_again())):
            return
        self._path = _path_of(trainer)
        record = _read(trainer) if self._is_restart else {}
        starts = record.get("starts", [])
        starts.append(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "from_step": trainer.global_step,
                "reached_step": trainer.global_step,
                "automatic": _is_automatic(),
            }
        )
        self._record = {"starts": starts, "loggers": describe_loggers(trainer.loggers)}
        self._write()
        if len(starts) > 1:
            rank_zero_info(
                f"MegatronStrategy: start {len(starts)} of this run, from step "
                f"{trainer.global_step}; the one before reached step "
                f"{starts[-2]['reached_step']}."
            )
        _check_progress(starts)

    def beat(self, trainer: pl.Trainer) -> None:
        """Note the step reached by this start, every ten seconds."""
        if self._path is None or time.monotonic() - self._beat_s < _BEAT_S:
            return
        self._beat_s = time.monotonic()
        self._record["starts"][-1]["reached_step"] = trainer.global_step
        self._write()

    def end(self, trainer: pl.Trainer) -> None:
        """Note the last step."""
        self._beat_s = float("-inf")
        self.beat(trainer)
        self._path = None

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._record, indent=1))
        os.replace(partial, self._path)


def _check_progress(starts: list[dict[str, Any]]) -> None:
    """Check that a recent restart has come further than the start before the restarts."""
    last = starts[-_STARTS_WITHOUT_PROGRESS:]
    if len(last) < _STARTS_WITHOUT_PROGRESS or not all(s["automatic"] for s in last[1:]):
        return
    first, *other_ranks = last
    if first["from_step"] == last[-1]["from_step"] and first["reached_step"] >= max(
        start["reached_step"] for start in other_ranks
    ):
        raise NoProgressError(
            f"this run was started {len(last)} times from step {first['from_step']} and never got "
            f"past step {first['reached_step']}: the failure repeats itself, as a bug does and a "
            "broken machine does not. Look at the first traceback of the last start; a start by "
            "hand counts anew."
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
