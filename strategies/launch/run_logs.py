"""One log over the restarts of a run: loggers continue at the step of the resumed run.

Lightning gives every start a new version. Its CSVLogger deletes the file of an equal version, and
rows of steps trained again would appear twice.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from megatron_lightning.parallel.replica_rng import ReplicaRng
from megatron_lightning.strategies.lightning_internals import name_of_log, set_version

_KEPT = "metrics.csv.before"  # rows logged before this start, until training starts


def describe_loggers(loggers: Sequence[Logger]) -> list[dict[str, Any]]:
    """Return plain values about each logger, for :func:`resume_logs`."""
    descriptions = []
    for logger in loggers:
        version = logger.version
        if isinstance(version, int | str):
            descriptions.append(
                {"kind": type(logger).__name__, "name": name_of_log(logger), "version": version}
            )
    return descriptions


def resume_logs(
    loggers: Sequence[Logger], recorded: Sequence[Mapping[str, Any]], *, is_first_rank: bool
) -> None:
    """Make loggers continue the logs of an earlier start, before the loggers create anything.

    Args:
        loggers: The Trainer's.
        recorded: Result of :func:`describe_loggers`. Empty: only logs of an equal version continue.
        is_first_rank: Whether this process will write.
    """
    loggers_left = list(recorded)
    for logger in loggers:
        match = next((r for r in loggers_left if r["kind"] == type(logger).__name__), None)
        if match is not None:
            loggers_left.remove(match)
            # A new name begins a new log.
            if match["name"] in (None, name_of_log(logger)):
                set_version(logger, match["version"])
        if is_first_rank and isinstance(logger, CSVLogger):
            _keep_rows(Path(logger.log_dir))


def create_experiments(loggers: Sequence[Logger]) -> None:
    """Create the loggers' runs without a trace in the random states. Lightning asks for them next.

    Trackers such as MLflow draw the name of a run, on rank 0 alone.
    """
    rng = ReplicaRng(torch.device("cpu"))
    states = rng.everything()
    for logger in loggers:
        getattr(logger, "experiment", None)
    rng.restore(states)


def drop_later_rows(loggers: Sequence[Logger], step: int) -> None:
    """Continue logs at ``step``. Rows of later steps belong to an interrupted run."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _restore_rows(logger, step)
        experiment: Any = getattr(logger, "experiment", None)
        # TensorBoard hides an earlier file's values from this step on.
        if step > 0 and hasattr(experiment, "purge_step") and hasattr(experiment, "all_writers"):
            experiment.close()
            experiment.purge_step = step


def _keep_rows(folder: Path) -> None:
    """Put aside the log file, before the logger deletes the file."""
    file, copy = folder / "metrics.csv", folder / _KEPT
    if not file.is_file():
        return
    if copy.is_file():  # after a start without training
        _write(copy, [*_read(copy), *_read(file)])
        file.unlink()
    else:
        os.replace(file, copy)


def _restore_rows(logger: CSVLogger, step: int) -> None:
    folder = Path(logger.log_dir)
    copy = folder / _KEPT
    if not copy.is_file():
        return
    rows = [row for row in _read(copy) if _step_of(row) < step]
    if rows:
        _write(folder / "metrics.csv", rows)
        logger.experiment.metrics_keys = sorted({key for row in rows for key in row})
    copy.unlink()


def _step_of(row: Mapping[str, str]) -> float:
    with suppress(ValueError):
        return float(row.get("step") or 0)
    return 0.0


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    keys = sorted({key for row in rows for key in row})
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=keys, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)
