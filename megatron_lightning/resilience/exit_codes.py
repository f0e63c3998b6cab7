"""Exit codes of a job's processes: one table for launchers and schedulers.

torchrun takes every code but 0 for a failure and starts the job again. A stop that was asked for
ends with 0 there, and the file ``stopped.json`` says that the run is not finished.
"""

from __future__ import annotations

import os

FINISHED = 0
"""The run has done all it was to do."""
FAILED = 1
"""A rank failed, or a monitor stopped the run."""
WRONG_CONFIGURATION = 2
"""A setting, an input or a checkpoint cannot work; the same command will fail again."""
RERUN_EQUAL = 16
"""A step that went wrong gave the same values again; as Megatron-LM's code."""
RERUN_DIFFERS = 17
"""A step that went wrong gave other values again, as broken hardware does; as Megatron-LM's."""
STOPPED = 75
"""Stopped on request and saved: start the same command to resume (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def code_of_stop(requested: int = STOPPED) -> int:
    """Return the exit code of a stop that was asked for, under the launcher of this process."""
    return FINISHED if under_torchrun() else requested
