"""Classification of Lightning's exceptions: failures of one rank, or stops agreed on by all
ranks.
"""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.errors import EXPLAINED, SpikeError
from megatron_lightning.lightning_internals.processes import TunerExit
from megatron_lightning.lightning_internals.trainer import refuses_settings
from megatron_lightning.resilience.exit_codes import TERMINATED
from megatron_lightning.resilience.failure_watch import FailureWatch
from megatron_lightning.resilience.out_of_memory import explain_out_of_memory
from megatron_lightning.step.agreed_stop import AgreedStop


def is_explained(error: BaseException) -> bool:
    """Return whether the message of ``error`` tells a user everything."""
    return isinstance(error, (*EXPLAINED, SpikeError)) or refuses_settings(error)


def report_failure(
    watch: FailureWatch | None, error: BaseException, *, prints_traceback: bool = True
) -> bool:
    """Report this rank's failure to the other ranks, unless all ranks leave the run with the same
    exception.

    Args:
        watch: Failure watch of this rank. None: no other ranks exist.
        error: Reason of the failure.
        prints_traceback: Whether this process prints the traceback. False: the starting process
            prints.

    Returns:
        Whether this rank fails only because another rank has failed.
    """
    explain_out_of_memory(error)
    if watch is None or isinstance(error, AgreedStop | TunerExit):
        return False
    # Code None means success: an agent would wait for the other nodes.
    if isinstance(error, SIGTERMException):
        error.code = TERMINATED
    follows = watch.report(error, explained=is_explained(error), prints_traceback=prints_traceback)
    return follows and not isinstance(error, KeyboardInterrupt)
