"""A rank of a job on a blend. A process of the job may be killed at a random moment.

Every rank notes the samples of every batch in ``FOLDER/RUN.jsonl``, and resumes from the newest
checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.models import TransformerConfig
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import trainer

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 8, 4097
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


class Kill(NamedTuple):
    """SIGKILL of a process."""

    victim: Literal["trainer", "worker"]
    rank: int
    after: int
    """Steps of the run before the kill."""
    delay_s: float
    """Seconds from the begin of the step."""


def blend(folder: str, steps: int, **options: Any) -> PretrainDataModule:
    """Return the data: the smaller data sets are read several times."""
    pairs = [(weight, f"{folder}/{name}_text_document") for name, weight in WEIGHTS.items()]
    return PretrainDataModule(
        {"train": pairs},
        SEQUENCE,
        global_batch_size=GLOBAL_BATCH,
        num_train_samples=GLOBAL_BATCH * steps,
        cache_dir=f"{folder}/cache",
        **options,
    )


def rows_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the data set and the tokens of each sample."""
    ids, tokens = batch["dataset_id"].reshape(-1, 1), batch["tokens"].reshape(-1, SEQUENCE)
    rows: list[list[int]] = torch.cat([ids, tokens], 1).tolist()
    return rows


class Notes(pl.Callback):
    """Notes the samples of every batch, and kills a process."""

    def __init__(self, path: Path, kill: Kill | None) -> None:
        self.path = path
        self.kill = kill
        self.num_steps = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, *_: Any) -> None:
        line = json.dumps([trainer.global_step, trainer.global_rank, rows_of(batch)])
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())  # at once: the process may be killed next
        kill, self.num_steps = self.kill, self.num_steps + 1
        if kill and (self.num_steps, trainer.global_rank) == (kill.after, kill.rank):
            (worker,) = multiprocessing.active_children()
            victim = os.getpid() if kill.victim == "trainer" else worker.pid
            threading.Timer(kill.delay_s, os.kill, (victim, signal.SIGKILL)).start()


def train(folder: str, run: int, steps: int, kill: Kill | None) -> None:
    """Fit on a rank."""
    pl.seed_everything(1, verbose=False)
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    fit = trainer(
        MegatronStrategy(),
        max_steps=steps,
        callbacks=[saving, Notes(Path(folder, f"{run}.jsonl"), kill)],
        limit_val_batches=0,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32,
        vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
    )  # fmt: skip
    module = GPTLightningModule(config, learning_rate=1e-3)
    fit.fit(module, datamodule=blend(folder, steps, num_workers=1), ckpt_path="last")
