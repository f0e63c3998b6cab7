"""Sizes of a job started by torchrun, as far as the user has set no sizes."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from megatron_lightning.strategies.lightning_internals import trainer_sizes


def sizes_of_torchrun(environment: ClusterEnvironment | None) -> tuple[int, int] | None:
    """Return torchrun's (processes of a node, nodes). None: the user's sizes hold.

    ``devices="auto"`` means torchrun's number of processes. ``num_nodes=1``, Lightning's default,
    means torchrun's number of nodes, both with ``devices="auto"`` and with ``devices`` equal to
    torchrun's several processes a node: an elastic job has other numbers after each restart.
    ``devices=1`` is a Trainer running beside the job.
    """
    given = trainer_sizes()
    local, nodes = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    is_torchrun = isinstance(environment, TorchElasticEnvironment)
    if given is None or not is_torchrun or local is None or nodes is None:
        return None
    devices, num_nodes = given
    takes_nodes = num_nodes == 1
    if devices == "auto":
        return int(local), int(nodes) if takes_nodes else num_nodes
    count = _count(devices)
    if takes_nodes and count == int(local) > 1:
        return count, int(nodes)
    return None


def _count(devices: Any) -> int | None:
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdecimal() else None
