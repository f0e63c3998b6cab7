"""End or restart of all processes of a job after a failure: reports of a rank's failure, process
watches, worker processes, hangs, and exit codes.
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.resilience.restart import Restarts

__all__ = ["Restarts"]

lazy_attributes(__name__, {"Restarts": "megatron_lightning.resilience.restart"})
