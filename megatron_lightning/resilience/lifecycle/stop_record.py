"""Traces of a stop on request: the file ``stopped.json`` and, under Slurm, a queued job."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path

from megatron_lightning.resilience.lifecycle.stop_requests import Reason

_FILE = "stopped.json"


def write_stop(
    folder: Path, reason: Reason, *, checkpoint: str | None, step: int, exit_code: int
) -> None:
    """Record a stop for scripts. Scripts may not see the exit code, since torchrun exits with its
    own code.
    """
    record = {
        "reason": reason.name.lower(),
        "checkpoint": checkpoint,
        "global_step": step,
        "exit_code": exit_code,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(f"{json.dumps(record)}\n")


def remove_stop(folder: Path) -> None:
    """Remove the record of an earlier stop."""
    (folder / _FILE).unlink(missing_ok=True)


def requeue_job() -> None:
    """Make Slurm end this job and queue the job again, as an array element for array jobs."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        failure = subprocess.run(
            ["scontrol", "requeue", job], check=False, capture_output=True, text=True
        )
        text = failure.stderr if failure.returncode else ""
    except OSError as error:
        text = str(error)
    if text:
        warnings.warn(
            f"job {job} is saved and was not queued again ({text.strip()}). Submit it once more.",
            stacklevel=2,
        )
