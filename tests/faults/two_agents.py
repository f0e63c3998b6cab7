"""Two agents of torchrun as two nodes on this machine: ``python -m tests.faults.two_agents MODULE
ARGUMENTS``.

Each is in a process group of its own, as in a terminal of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.slurm import free_port


def run_agents(program: list[str]) -> list[int]:
    """Run a program with its arguments under both; return their exit codes."""
    rendezvous = [
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
    ]
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--local-addr=127.0.0.1",
    ]
    agents = [
        subprocess.Popen([*agent, *rendezvous, "-m", *program], preexec_fn=os.setpgrp)
        for _ in range(2)
    ]
    return [agent.wait() for agent in agents]


if __name__ == "__main__":
    codes = run_agents(sys.argv[1:])
    print(f"AGENTS {codes}", flush=True)
    sys.exit(max(map(bool, codes)))
