"""What Slurm tells its tasks: two nodes on this machine, one rank on each, which nobody started and nobody watches."""

from __future__ import annotations

import socket


def free_port() -> str:
    """Return a port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


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
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)} for rank in (0, 1)]
