"""A training job with a fault: ``python -m tests.faults.job START_METHOD FAULT RANK [DEVICES [NODES]]``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import psutil

from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule


class Fault(pl.Callback):
    """Lets one rank fail at its third batch."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank != self.rank or batch_idx != 2:
            return
        if self.kind == "stage":
            self._fail_in_a_layer(module)
            return
        print(f"FAULT {time.time()} {os.getpid()}", flush=True)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.kind == "ctrl-c":
            os.killpg(0, signal.SIGINT)
        if self.kind == "raise":
            raise ValueError("the injected fault")

    def _fail_in_a_layer(self, module: pl.LightningModule) -> None:
        """Raise in the second micro-batch that the first layer of this rank sees."""
        calls = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                print(f"FAULT {time.time()} {os.getpid()}", flush=True)
                raise ValueError("the injected fault")

        next(iter(module.model.layers.values())).register_forward_pre_hook(fail)


def main() -> None:
    print(f"STARTED {time.time() - psutil.Process().create_time()} {time.process_time()}", flush=True)
    start_method, kind, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    devices, num_nodes = (*map(int, sys.argv[4:]), *(2, 1)[len(sys.argv) - 4 :])
    chunks = 2 if kind == "stage" else 1
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks,
        micro_batch_size=2,
        start_method=start_method,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=2,
        callbacks=[Fault(kind, rank)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(ToyModule(), datamodule=ToyData())
    print(f"DONE {trainer.global_rank} {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
