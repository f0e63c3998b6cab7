"""A training job with a fault: ``python -m tests.faults.job START_METHOD FAULT RANK [DEVICES [NODES
[FOLDER]]]``.

With a folder it saves and logs there, and resumes from the last checkpoint.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule


class Fault(pl.Callback):
    """Lets one rank fail at its third batch, when all have written something that is not on its way
    yet; a job that torchrun has started again does not fail."""

    def __init__(self, kind: str, rank: int, group: int) -> None:
        self.kind, self.rank, self.group = kind, rank, group

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        atexit.register(print, f"REGISTERED IN TRAINING {trainer.global_rank}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self.kind == "none" or trainer.global_step != 2 or is_restarted:
            return
        print(f"WRITTEN {trainer.global_rank}")
        if trainer.global_rank == self.rank:
            getattr(self, f"_{self.kind.replace('-', '_')}")(module)
        elif self.kind == "hang":
            threading.Event().wait()

    def _stage(self, module: pl.LightningModule) -> None:
        """Raise in the second micro-batch that the first layer of this rank sees."""
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                self._raise(module)

        _first_layer(module).register_forward_pre_hook(fail)

    def _raise(self, module: pl.LightningModule) -> None:
        _announce()
        raise ValueError("the injected fault")

    def _terminate(self, module: pl.LightningModule) -> None:
        """SIGTERM for this rank alone in the middle of a step, whose messages the other one waits
        for."""

        def end(*_: Any) -> None:
            hook.remove()
            _announce()
            os.kill(os.getpid(), signal.SIGTERM)

        hook = _first_layer(module).register_forward_pre_hook(end)

    _hang = _raise

    def _kill(self, module: pl.LightningModule) -> None:
        _announce()
        os.kill(os.getpid(), signal.SIGKILL)

    def _interrupt(self, module: pl.LightningModule) -> None:
        """Only this rank."""
        _announce()
        os.kill(os.getpid(), signal.SIGINT)

    def _ctrl_c(self, module: pl.LightningModule) -> None:
        """All that a terminal sends it to."""
        _announce()
        os.killpg(self.group, signal.SIGINT)


def _first_layer(module: pl.LightningModule) -> nn.Module:
    """Return the first layer that this rank runs."""
    layers = module.model.layers.values()
    return next(layer for layer in layers if any(True for _ in layer.parameters()))


def _announce() -> None:
    # Past what is not written out yet.
    os.write(1, f"\nFAULT {time.time()} {os.getpid()}\n".encode())


def main() -> None:
    print(
        f"STARTED {time.time() - psutil.Process().create_time()} {time.process_time()}", flush=True
    )
    start_method, kind, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    devices, num_nodes = (*map(int, sys.argv[4:6]), *(2, 1)[len(sys.argv[4:6]) :])
    folder = sys.argv[6] if len(sys.argv) > 6 else None
    kind, _, caught = kind.partition("+")
    # Its workers have sessions of their own.
    starter = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    atexit.register(
        partial(
            print,
            "REGISTERED AT FIRST",
            os.environ.get("LOCAL_RANK", "0"),
            os.environ.get("GROUP_RANK"),
        )
    )
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2 if kind == "stage" else 1,
        micro_batch_size=2,
        start_method=start_method,
    )
    fault = Fault(kind, rank, os.getpgid(starter))
    callbacks: list[pl.Callback] = [fault]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, every_n_train_steps=1))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=2,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=folder is not None and CSVLogger(folder, version=0, flush_logs_every_n_steps=1000),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(ToyModule(), datamodule=ToyData(), ckpt_path=None if folder is None else "last")
    except BaseException:
        if not caught:
            raise
        print("GOES ON", flush=True)
    print(f"DONE {trainer.global_rank} {trainer.global_step}", flush=True)


if __name__ == "__main__":
    # A shell lets what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
