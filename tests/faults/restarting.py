"""A job that starts again in its processes: ``python -m tests.faults.restarting FOLDER FAULTS
DEVICES [WORKERS]``. ``WORKERS`` is a number, or ``thread``.

``FAULTS`` is ``attempt:rank:step,…``. It prints the loss of every step, the samples of every batch,
and how long a restart takes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.resilience.restart import Restarts
from megatron_lightning.strategies import MegatronStrategy, run_with_restarts
from tests.helpers.toy import ToyData, ToyModule
from tests.lightning.support import TOY_TABLE

STEPS = 12


class _Faults(pl.Callback):
    """Raises as told, or kills the process where the attempt is ``k``."""

    def __init__(self, attempt: int, faults: str, raised: list[float]) -> None:
        self.attempt = attempt
        self.faults = [fault.split(":") for fault in faults.split(",") if fault]
        self.raised = raised

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        _say(f"SAMPLES {trainer.global_rank} {trainer.global_step} {batch['ids'].sum()}")
        for attempt, rank, step in self.faults:
            if (int(rank), int(step)) != (trainer.global_rank, trainer.global_step):
                continue
            if attempt == "k" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if attempt == str(self.attempt):
                _say(f"FAULT {time.time()} {os.getpid()}")
                raise RuntimeError("the injected fault")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        loss = float(args[1]["loss"])
        _say(f"LOSS {trainer.global_rank} {trainer.global_step} {loss!r}")
        if self.raised:
            _say(f"BACK {time.time() - self.raised.pop():.2f}")

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        self.raised.append(time.time())


def _say(text: str) -> None:
    os.write(1, f"\n{text}\n".encode())  # in one piece, and not lost with a process


def main() -> None:
    folder, faults, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
    workers = sys.argv[4] if len(sys.argv) > 4 else "0"
    attempts, raised = iter(range(10)), list[float]()

    def make_run() -> Any:
        pl.seed_everything(1, verbose=False)
        strategy = MegatronStrategy(
            pipeline_model_parallel_size=2,
            tensor_model_parallel_size=devices // 2,
            micro_batch_size=2,
            sequence_parallel=False,
            sharding_plan=TOY_TABLE if devices > 2 else None,
        )
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            max_steps=STEPS,
            callbacks=[
                ModelCheckpoint(folder, save_last=True, every_n_train_steps=2),
                _Faults(next(attempts), faults, raised),
            ],
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        options = {"reading_thread": True} if workers == "thread" else {"num_workers": int(workers)}
        data = ToyData(batch_size=8, num_samples=96, shuffle=True, **options)
        return partial(trainer.fit, ToyModule(mask=True), datamodule=data, ckpt_path="last")

    run_with_restarts(make_run, Restarts(in_process=3))
    _say("DONE")


if __name__ == "__main__":
    main()
