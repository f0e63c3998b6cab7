"""A job with one fault, on any launcher: ``python -m tests.faults.faulty_job FOLDER LAYOUT LAUNCHER
FAULT RANK``.

The fault happens once in the life of the folder. The job prints the loss of every step and a digest
of the samples of every batch, on every rank, and resumes from the newest checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import FaultInjector, HangWatch, RescueCheckpoint
from megatron_lightning.callbacks.rehearsal import faults
from megatron_lightning.models import TransformerConfig
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.resilience.restart import Restarts
from megatron_lightning.strategies import MegatronStrategy, run_with_restarts

STEPS = 8
FAULT_STEP = 4
HANG_S = 6.0
"""Time without the end of a batch that counts as a hang."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
    },
    "dp2-cp2": {"context_parallel_size": 2, "micro_batch_size": 2},
}


class Fault(FaultInjector):
    """One rank fails at the begin of a batch."""

    def __init__(self, folder: Path, kind: str, rank: int) -> None:
        self.is_sound = kind == "none"
        real: Any = "full_disk" if kind == "disk" else kind
        fault = faults.Fault(
            kind="slow" if self.is_sound else real, step=FAULT_STEP, rank=rank, num_steps=STEPS
        )
        super().__init__([fault], folder=folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        say(f"RANK {trainer.global_rank} {os.getpid()}")
        if not self.is_sound:
            super().on_train_start(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        digest = hashlib.sha256(batch["tokens"].numpy().tobytes()).hexdigest()[:12]
        say(f"SAMPLES {trainer.global_rank} {trainer.global_step} {digest}")
        # Every rank sees its own share of the data: all ranks note what they saw before the fault.
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _begin(self, *args: Any) -> None:
        say(f"FAULT {time.time()}")
        super()._begin(*args)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        say(f"LOSS {trainer.global_rank} {trainer.global_step} {float(args[1]['loss'])!r}")


def say(text: str) -> None:
    """Print a line at once, also from a process that dies next."""
    os.write(1, f"\n{text}\n".encode())


def make_run(folder: Path, layout: str, kind: str, rank: int) -> Any:
    """Return a function that fits."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**LAYOUTS[layout]),
        accelerator="cpu",
        devices=4,
        max_steps=STEPS,
        callbacks=[
            ModelCheckpoint(folder, save_last=True, every_n_train_steps=2),
            RescueCheckpoint(folder),
            HangWatch(factor=3.0, at_least=timedelta(seconds=HANG_S), action="stop"),
            Fault(folder, kind, rank),
        ],
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        vocab_size=64,
        max_sequence_length=16,
        hidden_dropout=0.1,
    )
    data = PretrainDataModule(
        sequence_length=16, global_batch_size=8, vocab_size=64, num_workers=2, mock=True
    )
    module = GPTLightningModule(config, learning_rate=1e-3)
    return partial(trainer.fit, module, datamodule=data, ckpt_path="last")


def main() -> None:
    say(f"STARTED {time.time() - psutil.Process().create_time()} {time.process_time()}")
    folder, layout, launcher, kind, rank = sys.argv[1:6]
    run = partial(make_run, Path(folder), layout, kind, int(rank))
    run_with_restarts(run, Restarts(in_process=2 if launcher == "in-process" else 0))
    say("DONE")


if __name__ == "__main__":
    main()
