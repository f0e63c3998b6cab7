"""The choice of a launcher: who starts the ranks of this node."""

from __future__ import annotations

import sys

from lightning.pytorch.strategies import ParallelStrategy

from megatron_lightning.config import StartMethod
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.hooks import LaunchHooks
from megatron_lightning.launch.popen_launcher import ScriptLauncher
from megatron_lightning.launch.spawn_launcher import WorkerLauncher


def make_launcher(
    strategy: ParallelStrategy,
    start_method: StartMethod,
    hooks: LaunchHooks,
    *,
    num_processes: int,
    num_nodes: int,
) -> ScriptLauncher | WorkerLauncher:
    """Return the launcher for ``start_method``. The processes of torchrun and Slurm are used
    unchanged.

    Args:
        strategy: The strategy of the ranks to start.
        start_method: Start method for several ranks without an external launcher.
        hooks: Functions for the launcher to call.
        num_processes: Ranks of this node.
        num_nodes: Nodes of the job.

    Raises:
        ConfigError: If the strategy has no cluster environment, or a notebook cannot start ranks
            this way.
    """
    environment = strategy.cluster_environment
    if environment is None:
        raise ConfigError(
            "the strategy has no cluster environment. Give it to a Trainer before it is used."
        )
    starts = num_processes * num_nodes > 1 and not environment.creates_processes_externally
    # Lightning refuses too, but advises another strategy.
    if starts and start_method != "fork" and (hasattr(sys, "ps1") or sys.flags.interactive):
        raise ConfigError(
            f"start_method={start_method!r} starts each of the {num_processes * num_nodes} ranks "
            "from a script file, and this is a notebook or an interactive session, which has none. "
            'Set MegatronStrategy(start_method="fork"), before anything has used a GPU, or run a '
            "script, or set devices=1."
        )
    if start_method == "popen" or not starts:
        return ScriptLauncher(environment, num_processes, num_nodes, hooks)
    return WorkerLauncher(strategy, start_method, hooks)
