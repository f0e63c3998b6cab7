"""Processes and their random states, under public names."""

from __future__ import annotations

# Creates the default process group and has the group destroyed at exit, as Lightning's own
# strategies do.
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group

# Threads for each process, unless the user has set OMP_NUM_THREADS. Lightning's own launchers call
# the same function.
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as share_threads

# Moves the states of optimizers made before the module had its device.
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device

# All random states seeded by Lightning.
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states

# Lightning has no public launchers. Lightning's launchers start the processes, and ours watch the
# processes.
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)

# How the learning rate finder leaves ``fit`` on purpose: not a failure.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

__all__ = [
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "TunerExit",
    "init_process_group",
    "optimizers_to_device",
    "random_states",
    "set_random_states",
    "share_threads",
]
