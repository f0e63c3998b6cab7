"""Submit a training by submitit, to Slurm or to processes of this machine.

    pip install submitit
    python examples/cluster/submitit_job.py --nodes 4 --tasks 8 --config configs/llama3_8b.yaml
    python examples/cluster/submitit_job.py --cluster local --tasks 2 --accelerator cpu --config ...

Options of `megatron-lightning fit` follow those of this script. The job resumes from the last
checkpoint. submitit's own requeue (a `checkpoint` method and SIGUSR2) is not used: a run that is
stopped saves by RescueCheckpoint, and the same command resumes it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import submitit


def train(options: Sequence[str]) -> None:
    """Run one rank."""
    if "SLURM_PROCID" not in os.environ:  # the local executor has no launcher's variables
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    from megatron_lightning.cli import main

    # LightningCLI compares its arguments with the command line, which is submitit's here.
    sys.argv = ["megatron-lightning"]
    main(["fit", *options, "--ckpt_path=last"])


def submit(arguments: Sequence[str]) -> submitit.Job[None]:
    """Submit the job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--folder", default="submitit", help="scripts and outputs")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=8, help="ranks of a node")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--partition", default=None)
    own, options = parser.parse_known_args(arguments)
    executor = submitit.AutoExecutor(folder=own.folder, cluster=own.cluster)
    executor.update_parameters(
        name="train", nodes=own.nodes, tasks_per_node=own.tasks, timeout_min=int(60 * own.hours)
    )
    if own.accelerator == "gpu":
        executor.update_parameters(gpus_per_node=own.tasks)
    if own.partition is not None:
        executor.update_parameters(slurm_partition=own.partition)
    sizes = [f"--trainer.num_nodes={own.nodes}", f"--trainer.devices={own.tasks}"]
    job: submitit.Job[None] = executor.submit(train, [*options, *sizes])
    return job


if __name__ == "__main__":
    submitted = submit(sys.argv[1:])
    print(f"job {submitted.job_id}: {submitted.paths.stdout}")
    submitted.wait()
    submitted.results()  # raises the exception of a failed rank
