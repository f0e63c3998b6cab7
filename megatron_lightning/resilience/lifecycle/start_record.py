"""The file ``starts.json`` of a run: one entry a start, with the steps it began at and reached.

Rank 0 keeps the file if a launcher may start the run again. A run that fails at the same step again
and again is ended by its record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.errors import NoProgressError
from megatron_lightning.resilience.restart import is_restarted

_FILE = "starts.json"
_SHARE_OF_BEATS = 0.01  # of the time, for notes of the reached step
_BEATS_S = (1.0, 10.0)  # least and most seconds between two notes
_STARTS_WITHOUT_PROGRESS = 3  # two restarts


class StartRecord:
    """The record of a run, with the current start as its last entry.

    Args:
        folder: Folder of the file.
        starts: Earlier starts of the run.
        step: First step of the current start.
        run: Id of the run.
        loggers: The run's logs, for the next start.
    """

    def __init__(
        self,
        folder: Path,
        starts: Sequence[Mapping[str, Any]],
        step: int,
        *,
        run: str,
        loggers: Sequence[Any],
    ) -> None:
        self._path = folder / _FILE
        self.starts = [
            *starts,
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "from_step": step,
                "reached_step": step,
                "automatic": is_automatic(),
            },
        ]
        """One entry a start."""
        self._rest = {"run": run, "loggers": loggers}
        self._next_beat_s = 0.0
        self._write()

    def beat(self, step: int) -> None:
        """Note the step reached by this start, every second, or less often on a slow disk."""
        begin_s = time.monotonic()
        if begin_s < self._next_beat_s:
            return
        self.note(step)
        end_s = time.monotonic()
        least, most = _BEATS_S
        self._next_beat_s = end_s + min(most, max(least, (end_s - begin_s) / _SHARE_OF_BEATS))

    def note(self, step: int) -> None:
        """Note the step reached by this start."""
        self.starts[-1] = {**self.starts[-1], "reached_step": step}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._rest | {"starts": self.starts}, indent=1))
        os.replace(partial, self._path)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record in a folder. Empty: there is none, or it cannot be read."""
    try:
        record = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def check_progress(starts: Sequence[Mapping[str, Any]]) -> None:
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


def may_start_again() -> bool:
    """Return whether torchrun, Slurm or the process itself starts this run again."""
    elastic = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return is_restarted() or elastic or "SLURM_JOB_ID" in os.environ


def is_automatic() -> bool:
    """Return whether a launcher has started this run again."""
    counts = (os.environ.get(n, "0") for n in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return is_restarted() or any(count != "0" for count in counts)
