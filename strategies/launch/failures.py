"""Classification of Lightning's exceptions: failures of one rank, or stops that all ranks have
agreed on.
"""

from __future__ import annotations

import signal

from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.errors import EXPLAINED, SpikeError
from megatron_lightning.resilience.failure import FailureWatch
from megatron_lightning.strategies.launch.out_of_memory import explain_out_of_memory
from megatron_lightning.strategies.lightning_internals import TunerExit, refuses_settings

_TERMINATED = 128 + signal.SIGTERM  # exit code, as shells have it


class AgreedStop(SIGTERMException):
    """All ranks end the run here and know it: none has failed, and none waits for another."""


def is_explained(error: BaseException) -> bool:
    """Return whether the message of ``error`` is all that a user needs."""
    return isinstance(error, (*EXPLAINED, SpikeError)) or refuses_settings(error)


def report_failure(
    watch: FailureWatch | None, error: BaseException, *, prints_traceback: bool = True
) -> bool:
    """Report to the other ranks that this one fails, unless all ranks leave the run with the same
    exception.

    Args:
        watch: Of this rank; None: there are no others.
        error: Why it fails.
        prints_traceback: Whether this process is the one to print it; False: its starter does.

    Returns:
        Whether it fails only because another rank has.
    """
    explain_out_of_memory(error)
    if watch is None or isinstance(error, AgreedStop | TunerExit):
        return False
    # Code None is success, with which an agent waits for the other nodes.
    if isinstance(error, SIGTERMException):
        error.code = _TERMINATED
    follows = watch.report(error, explained=is_explained(error), prints_traceback=prints_traceback)
    return follows and not isinstance(error, KeyboardInterrupt)
