"""A rank of a policy's fit. One of two replicas may be killed while it samples or updates.

Every rank notes the gradient norm of each step in ``FOLDER/norms-RANK.jsonl``, and resumes from the
newest checkpoint.

    python -m tests.faults.policy_job FOLDER MOMENT STEP

MOMENT is "sampling", "update" or "never", and STEP the steps of the whole run before it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import GPTLightningModule, RolloutDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.policies import Policy
from tests.helpers.trainers import Losses, trainer

VICTIM = 1
GENERATIONS, UPDATES = 4, 2


class Job(Losses):
    """Notes norms, and kills the victim."""

    def __init__(self, folder: str, moment: str, step: int) -> None:
        super().__init__()
        self._folder = folder
        self._moment = moment
        self._step = step
        self._trainer: pl.Trainer | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        with Path(self._folder, f"norms-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, self.norms[-1]]) + "\n")
        self._kill("update")

    def reward(self, prompt: list[int], answer: list[int], row: Mapping[str, Any]) -> float:
        """Reward even ids, in the middle of a generation."""
        self._kill("sampling")
        return sum(one % 2 == 0 for one in answer) / max(len(answer), 1)

    def _kill(self, moment: str) -> None:
        fit = self._trainer
        now = None if fit is None else (fit.global_rank, moment, fit.global_step)
        if now == (VICTIM, self._moment, self._step):
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, moment: str, step: int) -> None:
    """Train from the newest checkpoint."""
    job = Job(folder, moment, step)
    saved = Path(folder, "saved")
    newest = max(saved.glob("*.ckpt"), default=None, key=lambda path: int(path.stem[5:]))
    keep = ModelCheckpoint(
        str(saved), "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    fit = trainer(
        MegatronStrategy(
            data_parallel="zero1", pipeline_options=PipelineOptions(explicit_steps=True)
        ),
        devices=2, max_epochs=1, callbacks=[keep, job], default_root_dir=folder,
        enable_checkpointing=True,
    )  # fmt: skip
    data = RolloutDataModule(
        prompts=f"{folder}/prompts.jsonl", rewards={"evens": job.reward}, num_generations=4,
        batch_size=8, end_ids=[7], pad_to=4,
    )  # fmt: skip
    module = GPTLightningModule(tiny_config(vocab_size=16, max_sequence_length=16))
    policy = Policy(module, max_completion_length=6, updates_per_generation=UPDATES)
    fit.fit(policy, datamodule=data, ckpt_path=None if newest is None else str(newest))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
