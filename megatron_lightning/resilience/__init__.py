"""End or restart of all processes of a job when one fails: reports of a rank's failure, process
watches, worker processes, hangs, and exit codes.
"""

from megatron_lightning.resilience.restart import Restarts

__all__ = ["Restarts"]
