"""A job with one fault, on any launcher: ``python -m tests.faults.faulty_job FOLDER LAYOUT LAUNCHER
FAULT RANK``.

The fault happens once in the life of the folder. The job prints the loss of every step and a digest
of the samples of every batch, on every rank, and resumes from the newest checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import HangWatch, RescueCheckpoint
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
DISK = ("fsync", "write", "writev", "pwrite", "rename", "replace")


class Fault(pl.Callback):
    """One rank fails at the begin of a batch."""

    def __init__(self, folder: Path, kind: str, rank: int) -> None:
        self.folder = folder
        self.kind = kind
        self.rank = rank

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        say(f"RANK {trainer.global_rank} {os.getpid()}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        digest = hashlib.sha256(batch["tokens"].numpy().tobytes()).hexdigest()[:12]
        say(f"SAMPLES {trainer.global_rank} {trainer.global_step} {digest}")
        # Every rank sees its own share of the data: all ranks note what they saw before the fault.
        if trainer.global_step != FAULT_STEP or trainer.global_rank != self.rank:
            return
        if self.kind == "none" or (self.folder / "fault").exists():
            return
        (self.folder / "fault").touch()
        say(f"FAULT {time.time()}")
        getattr(self, f"_{self.kind}")()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        say(f"LOSS {trainer.global_rank} {trainer.global_step} {float(args[1]['loss'])!r}")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exception(self) -> None:
        raise RuntimeError("the injected fault")

    def _hang(self) -> None:
        threading.Event().wait()

    def _disk(self) -> None:
        """No byte of a checkpoint can be written from now on."""

        def full(function: Any, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], int) and args[0] <= 2:
                return function(*args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for name in DISK:
            setattr(os, name, partial(full, getattr(os, name)))

    def _sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _sigusr1(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


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
