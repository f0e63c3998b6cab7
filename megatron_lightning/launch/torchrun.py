"""Sizes of a job started by torchrun, as far as the user has set no sizes."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from megatron_lightning.lightning_internals.trainer import trainer_sizes


def sizes_of_torchrun(environment: ClusterEnvironment | None) -> tuple[int, int] | None:
    """Return torchrun's (processes of a node, nodes). None: the user's sizes hold.

    ``devices="auto"`` means torchrun's number of processes. ``num_nodes=1``, Lightning's default,
    means torchrun's number of nodes, both with ``devices="auto"`` and with ``devices`` equal to
    torchrun's several processes a node: an elastic job has other numbers after each restart.
    ``devices=1`` is a Trainer running beside the job.
    """
    sizes = trainer_sizes()
    local_size, nodes = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    is_torchrun = isinstance(environment, TorchElasticEnvironment)
    if sizes is None or not is_torchrun or local_size is None or nodes is None:
        return None
    devices, num_nodes = sizes
    takes_nodes = num_nodes == 1
    if devices == "auto":
        return int(local_size), int(nodes) if takes_nodes else num_nodes
    count = _count(devices)
    if takes_nodes and count == int(local_size) > 1:
        return count, int(nodes)
    return None


def _count(devices: Any) -> int | None:
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdecimal() else None
