"""Saving before the end: SIGTERM on any rank, every so many minutes, and local copies; going on is bit-equal."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import LocalCopyCheckpoint, RescueCheckpoint
from megatron_lightning.checkpoint import is_committed
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.strategies.failure import FailureWatch
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import DP2, PP2, PP2_DP2, SINGLE, Layout, layouts, run

STOP = 3


class _Terminated(pl.Callback):
    """Sends SIGTERM to one rank in the middle of a batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(
    layout: Layout, folder: str, *callbacks: pl.Callback, ckpt_path: str | None = None, **more: Any
) -> tuple[Any, list[float]]:
    record, module = Losses(), ToyModule()
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, **more}
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


class _Fails(pl.Callback):
    """Raises on every rank in step ``STOP``: on each where it is told to."""

    def __init__(self, *places: str) -> None:
        self.places = places

    def _fail(self, trainer: pl.Trainer, place: str) -> None:
        if self.places[trainer.global_rank % len(self.places)] == place:
            raise ValueError(f"raised {place}")

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == STOP:
            self._fail(trainer, "before the update")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STOP + 1:
            self._fail(trainer, "after the update")


def _failed(layout: Layout, folder: str, *places: str) -> dict[str, Any]:
    whole, losses = _fit(layout, f"{folder}/whole")
    impatient = partialmethod(MegatronStrategy.all_ranks_interrupted, within_s=1.0)
    with (
        mock.patch.object(MegatronStrategy, "all_ranks_interrupted", impatient),
        mock.patch.object(FailureWatch, "report"),  # it would end the ranks of this test
        pytest.raises(ValueError, match="raised"),
    ):
        layout.trainer(
            folder,
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=[RescueCheckpoint(folder, on_sigterm=False), _Fails(*places)],
        ).fit(ToyModule(), datamodule=layout.data_module())
    if not is_committed(f"{folder}/rescue.ckpt"):
        return {"saved": False}
    end, rest = _fit(layout, folder, RescueCheckpoint(folder), ckpt_path="last")
    same = all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
    return {"saved": True, "losses": rest == losses[-len(rest) :], "steps": len(rest), "same": same}


def test_an_exception_in_a_step_repeats_its_batch(tmp_path: Path) -> None:
    for rank in run(PP2, _failed, tmp_path, "before the update"):
        assert rank == {"saved": True, "losses": True, "steps": 8 - STOP, "same": True}


def test_ranks_that_an_exception_meets_on_two_sides_of_an_update_save_nothing(tmp_path: Path) -> None:
    for rank in run(PP2, _failed, tmp_path, "after the update", "before the update"):
        assert rank == {"saved": False}


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


# Local copies


def _lose(*paths: str) -> None:
    """Delete what a lost node had, between two runs."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _lost_nodes(layout: Layout, folder: str) -> dict[str, Any]:
    """Train on two nodes of one rank each; go on after either's disk is lost, and after both copies of a part are."""
    os.environ["LOCAL_RANK"] = "0"
    nodes: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    disk = f"{folder}/disk-{{node_rank}}"

    def copies() -> LocalCopyCheckpoint:
        return LocalCopyCheckpoint(disk, every_n_train_steps=1, dirpath=folder)

    whole, losses = _fit(layout, f"{folder}/whole", **nodes)
    often = ModelCheckpoint(folder, "shared", every_n_train_steps=2, save_top_k=1, enable_version_counter=False)
    _, first = _fit(layout, folder, copies(), often, max_steps=STOP, **nodes)
    kept = sorted(len(os.listdir(f"{folder}/disk-{node}")) for node in range(2))
    result: dict[str, Any] = {"first": first == losses[:STOP], "kept": kept}
    for lost in (0, 1):
        _lose(f"{folder}/disk-{lost}")
        end, rest = _fit(layout, folder, RescueCheckpoint(folder), ckpt_path=f"{folder}/local.ckpt", **nodes)
        same = all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
        result[f"lost {lost}"] = (rest == losses[STOP:], same)
    end, rest = _fit(layout, folder, copies(), ckpt_path="last", **nodes)  # the pointer is the newest
    result["last"] = rest == losses[STOP:]
    _lose(f"{folder}/disk-0", f"{folder}/disk-1")
    _, rest = _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
    result["shared"] = rest == losses[STOP - 1 :]  # saved at step 2
    _lose(f"{folder}/shared.ckpt")
    with pytest.raises(CheckpointError, match=r"points to local copies .* on no node"):
        _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
    return result


@layouts(PP2, slow=[DP2])
def test_local_copies_survive_the_loss_of_a_node(layout: Layout, tmp_path: Path) -> None:
    expected = {"first": True, "kept": [2, 2], "lost 0": (True, True), "lost 1": (True, True), "last": True, "shared": True}
    for rank in run(layout, _lost_nodes, tmp_path):
        assert rank == expected


def test_copies_need_one_interval() -> None:
    for intervals in ({}, {"every_n_train_steps": 1, "every_n_minutes": 1.0}, {"every_n_minutes": 0.0}):
        with pytest.raises(ConfigError, match="need one interval"):
            LocalCopyCheckpoint("folder", **intervals)
