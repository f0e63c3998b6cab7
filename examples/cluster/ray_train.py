"""Train under Ray Train: Ray starts the workers, and starts all of them again after a failure.

    pip install "ray[train]"
    python examples/cluster/ray_train.py --workers 8 --config configs/llama31_8b.yaml
    python examples/cluster/ray_train.py --workers 2 --accelerator cpu --config ...

Options of `megatron-lightning fit` follow those of this script. The strategy takes the process
group that Ray has made. After a failure the run resumes from its last checkpoint, so the folder of
the checkpoints must be seen by all nodes. Several nodes were not tried.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Run one worker."""
    os.chdir(config["folder"])
    from megatron_lightning.cli import trainer_cli

    context = get_context()
    local = context.get_local_world_size()
    sys.argv = ["megatron-lightning"]  # LightningCLI compares its arguments with the command line
    cli = trainer_cli(
        [
            *config["options"],
            f"--trainer.num_nodes={context.get_world_size() // local}",
            f"--trainer.devices={local}",
            "--trainer.plugins+=ray.train.lightning.RayLightningEnvironment",
        ],
        run=False,
    )
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path="last")


def make_trainer(arguments: Sequence[str]) -> TorchTrainer:
    """Return Ray's trainer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--storage", default=os.path.abspath("ray_results"))
    own, options = parser.parse_known_args(arguments)
    has_gpus = own.accelerator == "gpu"
    return TorchTrainer(
        train,
        train_loop_config={"options": options, "folder": os.getcwd()},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=own.workers, use_gpu=has_gpus),
        run_config=RunConfig(
            storage_path=own.storage, failure_config=FailureConfig(max_failures=own.max_failures)
        ),
    )


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    print(make_trainer(sys.argv[1:]).fit())
