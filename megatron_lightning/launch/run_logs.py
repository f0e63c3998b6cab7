"""One log over the restarts of a run: loggers continue at the step of the resumed run.

Lightning gives every start a new version. No data of a logger are deleted: rows of a CSV file
trained again go to a file beside, TensorBoard hides values, and W&B and MLflow keep both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from megatron_lightning.lightning_internals.logs import has_experiment, name_of_log, set_version
from megatron_lightning.parallel.random.replica_rng import ReplicaRng
from megatron_lightning.resilience.lifecycle.csv_rows import CsvRows


def describe_loggers(loggers: Sequence[Logger]) -> list[dict[str, Any]]:
    """Return plain values about each logger, for :func:`choose_versions`."""
    descriptions = []
    for logger in loggers:
        version = logger.version
        if isinstance(version, int | str):
            descriptions.append(
                {"kind": type(logger).__name__, "name": name_of_log(logger), "version": version}
            )
    return descriptions


def choose_versions(loggers: Sequence[Logger], recorded: Sequence[Mapping[str, Any]]) -> None:
    """Make loggers continue recorded logs. Loggers without a record begin new logs.

    Args:
        loggers: Loggers without a version of the user's and without an experiment.
        recorded: Result of :func:`describe_loggers` in an earlier start of the run.
    """
    left = list(recorded)
    for logger in loggers:
        match = next((r for r in left if r["kind"] == type(logger).__name__), None)
        if match is not None:
            left.remove(match)
        # A new name begins a new log.
        is_same = match is not None and match["name"] in (None, name_of_log(logger))
        set_version(logger, match["version"] if match is not None and is_same else None)


def open_logs(loggers: Sequence[Logger], *, resumes: bool) -> list[CsvRows]:
    """Create the loggers' runs without a trace in the random states. Lightning asks for them next.

    Trackers such as MLflow draw the name of a run, on rank 0 alone.

    Args:
        loggers: The Trainer's, on rank 0.
        resumes: Whether steps that these loggers have logged may come again.

    Returns:
        The rows of earlier starts.
    """
    rng = ReplicaRng(torch.device("cpu"))
    states = rng.everything()
    earlier = []
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            rows, is_open = CsvRows(logger), has_experiment(logger)
            if not is_open:
                rows.open()
            elif resumes:
                rows.count()
            earlier.append(rows)
        else:
            getattr(logger, "experiment", None)
    rng.restore(states)
    return earlier


def hide_later_curves(loggers: Sequence[Logger], step: int) -> None:
    """Make TensorBoard hide an earlier file's values from ``step`` on. The file keeps them."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if step > 0 and hasattr(experiment, "purge_step") and hasattr(experiment, "all_writers"):
            experiment.close()
            experiment.purge_step = step
