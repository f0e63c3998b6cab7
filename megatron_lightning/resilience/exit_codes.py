"""Exit codes of a job's processes, for launchers and schedulers.

torchrun takes every code but 0 for a failure and starts the job again. So a requested stop under
torchrun ends with 0, and the file ``stopped.json`` marks the run as unfinished.
"""

from __future__ import annotations

import os

FINISHED = 0
"""The run is complete."""
FAILED = 1
"""A rank failed, or a monitor stopped the run."""
WRONG_CONFIGURATION = 2
"""A setting, an input or a checkpoint cannot work. The same command will fail again."""
RERUN_EQUAL = 16
"""A wrong step gave the same values again. Equal to Megatron-LM's code."""
RERUN_DIFFERS = 17
"""A wrong step gave other values again, a sign of broken hardware. Equal to Megatron-LM's code."""
STOPPED = 75
"""Stopped on request and saved: start the same command to resume (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""Ctrl-C, with the code of shells."""
TERMINATED = 143
"""SIGTERM without a save, with the code of shells."""


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def code_of_stop(requested: int = STOPPED) -> int:
    """Return the exit code of a requested stop, under the launcher of this process."""
    return FINISHED if under_torchrun() else requested
