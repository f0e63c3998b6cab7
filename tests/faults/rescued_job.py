"""A training job that is told to end: ``torchrun … -m tests.faults.rescued_job FOLDER STEPS``; it
says which steps are done."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.callbacks import RescueCheckpoint
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule


class _Speaks(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.05)
        print(f"STEP {trainer.global_rank} {trainer.global_step}", flush=True)


def main() -> None:
    folder, steps = sys.argv[1], int(sys.argv[2])
    trainer = pl.Trainer(
        strategy=MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=2),
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        callbacks=[RescueCheckpoint(folder), _Speaks()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ToyModule(), datamodule=ToyData(), ckpt_path="last")
    print(f"DONE {trainer.global_rank} {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
