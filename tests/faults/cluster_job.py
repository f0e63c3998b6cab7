"""The recipe of a job for ``megatron-lightning fit`` on a cluster, and callbacks of it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from tests.faults.faulty_job import FAULT_STEP, say


class Pause(pl.Callback):
    """The last rank comes late to every batch: others wait for it inside of their step, where
    signals find them.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(self.pause_s)


class Rows(pl.Callback):
    """Print a digest of every row of this rank's batches."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, _: int) -> None:
        digests = [
            hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in batch["tokens"]
        ]
        say(f"ROWS {trainer.world_size} {trainer.global_step} {','.join(digests)}")


class Verdict(pl.Callback):
    """End with what a rerun of a step says."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FAULT_STEP:
            trainer.strategy.rerun_step().end_run("the step is to be looked at")


def write_recipe(
    folder: Path,
    *,
    num_nodes: int,
    devices: int | str,
    strategy: dict[str, Any],
    steps: int = 8,
    fault: str = "none",
    rank: int = 0,
    pause_s: float = 0.0,
    callbacks: tuple[dict[str, Any], ...] = (),
    hidden_dropout: float = 0.1,
    **trainer: Any,
) -> Path:
    """Write the recipe of a small GPT, which prints losses and samples of every rank, into a
    folder.

    Args:
        folder: Folder of the job.
        num_nodes: Nodes.
        devices: Ranks of a node, or "auto".
        strategy: Options of the strategy.
        steps: Optimizer steps.
        fault: Kind of the fault of ``faulty_job.py``.
        rank: Rank of the fault.
        pause_s: Seconds that the last rank comes late to every batch.
        callbacks: More callbacks.
        hidden_dropout: Dropout, of which the draws depend on the number of replicas.
        trainer: More options of the Trainer.
    """
    model = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "vocab_size": 64,
        "max_sequence_length": 16,
        "hidden_dropout": hidden_dropout,
    }
    data = {
        "mock": True,
        "data_prefix": None,
        "vocab_size": 64,
        "sequence_length": 16,
        "global_batch_size": 8,
        "num_workers": 2,
    }
    recipe = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": devices,
            "num_nodes": num_nodes,
            "strategy": {
                "class_path": "megatron_lightning.strategies.MegatronStrategy",
                "init_args": {"micro_batch_size": 2, **strategy},
            },
            "max_steps": steps,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": f"{folder}/checkpoints",
                        "save_last": True,
                        "every_n_train_steps": 2,
                    },
                },
                {
                    "class_path": "tests.faults.faulty_job.Fault",
                    "init_args": {"folder": str(folder), "kind": fault, "rank": rank},
                },
                {
                    "class_path": "tests.faults.cluster_job.Pause",
                    "init_args": {"pause_s": pause_s},
                },
                *callbacks,
            ],
            **trainer,
        },
        "model": {
            "class_path": "megatron_lightning.modules.GPTLightningModule",
            "init_args": {"config": model, "learning_rate": 1e-3},
        },
        "data": {
            "class_path": "megatron_lightning.modules.PretrainDataModule",
            "init_args": data,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def rescue(folder: Path, **options: Any) -> dict[str, Any]:
    """Return a RescueCheckpoint for the recipe."""
    return {
        "class_path": "megatron_lightning.callbacks.RescueCheckpoint",
        "init_args": {"dirpath": f"{folder}/checkpoints", **options},
    }
