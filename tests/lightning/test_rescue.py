"""Saving before the end: SIGTERM on any rank, every so many minutes, and local copies; going on is bit-equal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.callbacks import RescueCheckpoint
from megatron_lightning.checkpoint import is_committed
from megatron_lightning.errors import ConfigError
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import PP2, PP2_DP2, SINGLE, Layout, layouts, run

STOP = 3


class _Terminated(pl.Callback):
    """Sends SIGTERM to one rank in the middle of a batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(layout: Layout, folder: str, *callbacks: pl.Callback, ckpt_path: str | None = None) -> tuple[Any, list[float]]:
    record, module = Losses(), ToyModule()
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    trainer = layout.trainer(folder, callbacks=[record, *callbacks], **options)
    try:
        trainer.fit(module, datamodule=layout.data_module(), ckpt_path=ckpt_path)
    except SystemExit as end:
        return type(end).__name__, record.losses
    return [p.detach().clone() for p in module.parameters()], record.losses


def _rescued(layout: Layout, folder: str) -> dict[str, Any]:
    whole, losses = _fit(layout, f"{folder}/whole")
    handler = signal.getsignal(signal.SIGTERM)
    end, first = _fit(layout, folder, RescueCheckpoint(folder), _Terminated(rank=layout.ranks - 1))
    restored = signal.getsignal(signal.SIGTERM) is handler
    going_on, rest = _fit(layout, folder, RescueCheckpoint(folder), ckpt_path="last")
    same = all(torch.equal(a, b) for a, b in zip(whole, going_on, strict=True))
    return {"end": end, "restored": restored, "steps": (len(first), len(rest)), "losses": first + rest == losses, "same": same}


@layouts(PP2, slow=[PP2_DP2])
def test_sigterm_on_one_rank_saves_on_all_and_going_on_is_bit_equal(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _rescued, tmp_path):
        assert rank == {"end": "AgreedStop", "restored": True, "steps": (STOP, 8 - STOP), "losses": True, "same": True}
    assert is_committed(tmp_path / "rescue.ckpt")


def _saves(layout: Layout, folder: str, every_n_minutes: float, accumulate: int) -> list[int]:
    saved: list[int] = []

    class Counted(RescueCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            saved.append(trainer.global_step)

    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": True, "accumulate_grad_batches": accumulate}
    trainer = layout.trainer(folder, callbacks=[Counted(folder, every_n_minutes=every_n_minutes)], **options)
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return saved


def test_saves_in_time_fall_on_optimizer_steps(tmp_path: Path) -> None:
    assert run(SINGLE, _saves, tmp_path, 1e-9, 2) == [[1, 2]]  # 4 batches, 2 a step
    assert run(SINGLE, _saves, tmp_path / "never", 60.0, 1) == [[]]
    assert (tmp_path / "rescue.ckpt").is_file() and not (tmp_path / "never").exists()
    with pytest.raises(ConfigError, match="every_n_minutes is 0"):
        RescueCheckpoint(every_n_minutes=0)
