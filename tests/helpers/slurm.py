"""Slurm's environment variables for two nodes on this machine, one rank on each, which nobody
started or watches."""

from __future__ import annotations

import random
import socket

# Below those that systems give to connections, one of which could take it before it is used.
_PORTS = range(20000, 32768)


def free_port() -> str:
    """Return a port on which nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", port)):
                return str(port)
    raise RuntimeError(f"all of 100 ports between {_PORTS[0]} and {_PORTS[-1]} are taken")


def two_tasks() -> list[dict[str, str]]:
    """Return the variables of each task."""
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    return [
        {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
        for rank in (0, 1)
    ]
