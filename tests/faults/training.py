"""A training job of two ranks that saves after every step, and dies before any change of the disk
that one chooses.

Run as a program: ``python -m tests.faults.training START_METHOD FOLDER SAVING POINTS``, also under
torchrun; ``SAVING`` is sync or async, ``POINTS`` a JSON object of rank -> number of the change
before which that rank dies.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.config import CheckpointOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.faults.saving import die
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

STEPS = 5
CALLS = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
Points = Mapping[int, int]
"""Rank -> number of the change of the disk before which it dies."""


class DiskWatch:
    """Notes every change that this process makes to the disk, and kills the process before one of
    them.

    Args:
        fatal: Which one, counted from 1; None: none.
    """

    def __init__(self, fatal: int | None) -> None:
        self.changes: list[str] = []
        self._fatal, self._lock = fatal, threading.Lock()

    def install(self) -> None:
        """Begin; there is no way back in this process."""
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.changes.append(
                    " ".join([name, *(Path(a).name for a in args if not isinstance(a, int))])
                )
                if len(self.changes) == self._fatal:
                    print(f"FAULT {time.time()} {os.getpid()}", flush=True)
                    die()
            return function(*args, **kwargs)

        return call


class _Progress(pl.Callback):
    """Collects the loss of every step, and notes on the disk which steps have begun."""

    def __init__(self, folder: str, points: Points) -> None:
        self.folder, self.points, self.losses = folder, points, dict[int, float]()
        self.disk = DiskWatch(None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.disk = DiskWatch(self.points.get(trainer.global_rank))
        self.disk.install()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            with open(f"{self.folder}/begun", "ab", buffering=0) as file:
                file.write(b".")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])


def train(
    folder: str, saving: str, points: Points, start_method: Any = "popen"
) -> tuple[dict[int, float], list[str]]:
    """Train from the last checkpoint in ``<folder>/run``, or from the beginning, to the end.

    Returns:
        The loss of every step taken, and this rank's changes of the disk.
    """
    progress = _Progress(folder, points)
    keep = ModelCheckpoint(
        f"{folder}/run",
        "{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=1,
    )
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        micro_batch_size=4,
        checkpoint_options=CheckpointOptions(async_save=saving == "async"),
        start_method=start_method,
    )
    is_new = not Path(folder, "run", "last.ckpt").exists()
    pl.seed_everything(7 if is_new else 8, verbose=False)  # a checkpoint must know better
    fit = trainer(
        strategy,
        devices=2,
        max_steps=STEPS,
        callbacks=[progress, keep],
        enable_checkpointing=True,
        default_root_dir=f"{folder}/root",
    )
    data = ToyData(batch_size=8, num_samples=8 * (STEPS + 1), shuffle=True)
    fit.fit(ToyModule(num_layers=2, mask=True), datamodule=data, ckpt_path="last")
    return progress.losses, progress.disk.changes


def main() -> None:
    start_method, folder, saving = sys.argv[1:4]
    points = {int(rank): number for rank, number in json.loads(sys.argv[4]).items()}
    losses, changes = train(folder, saving, points, start_method)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    Path(folder, f"ended-{rank}").write_text(json.dumps([losses, changes]))


if __name__ == "__main__":
    main()
