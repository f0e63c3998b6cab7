"""Monitors of long runs: times of stages, slow ranks, garbage, profiles, the closing lines."""

from __future__ import annotations

import errno
import gc
import gzip
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import (
    ClosingSummary,
    GarbageCollection,
    MemorySnapshot,
    ProfilerWindow,
    StageTimers,
    StragglerMonitor,
)
from megatron_lightning.callbacks.closing_summary import next_command
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import DP2, ONE, PP2, TP2_PP2, Layout, Lines, layouts, run

SLOW_S = 0.1


class _Slow(ToyModule):
    """Every forward of the last rank sleeps; values that are logged are not reduced in the step,
    where ranks would wait."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def _loss(self, batch: Any) -> Any:
        loss = super()._loss(batch)
        if self.trainer.world_size > 1 and self.global_rank == self.trainer.world_size - 1:
            time.sleep(SLOW_S)
        return loss


class _Collections(pl.Callback):
    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.enabled.append(gc.isenabled())


def _watched(layout: Layout, folder: str) -> dict[str, Any]:
    timers, stragglers, garbage = StageTimers(), StragglerMonitor(window=2), GarbageCollection(3)
    profiler, seen = ProfilerWindow(2, 2, ranks=[0, layout.ranks - 1]), _Collections()
    closing, lines = ClosingSummary(), Lines()
    keep = ModelCheckpoint(folder, save_last=True, monitor="train_loss", every_n_train_steps=4)
    trainer = layout.trainer(
        folder,
        callbacks=[timers, stragglers, garbage, profiler, seen, closing, keep, MemorySnapshot()],
        logger=lines,
        log_every_n_steps=1,
        max_epochs=2,
        enable_checkpointing=True,
    )
    trainer.fit(_Slow(), datamodule=layout.data_module())
    keys = {k: float(v) for k, v in trainer.callback_metrics.items() if k.count("/")}
    return {
        "values": keys,
        "logged": sum("stage/forward_max" in line for _, line in lines.lines),
        "collections": garbage.collections,
        "enabled": (any(seen.enabled), gc.isenabled()),
        "text": closing.text,
        "overhead": (timers.overhead, stragglers.overhead),
    }


@pytest.mark.slow
@layouts(PP2, ONE, TP2_PP2, DP2)
def test_values_are_equal_on_every_rank(layout: Layout, tmp_path: Path) -> None:
    first, *others = run(layout, _watched, tmp_path)
    for rank in others:
        assert rank["values"] == first["values"] and rank["text"] == ""
    values = first["values"]
    assert first["logged"] == 8 and all(map(math.isfinite, values.values()))
    for phase in ("forward", "backward", "other"):
        assert 0 <= values[f"stage/{phase}_min"] <= values[f"stage/{phase}_max"]
    assert values["stage/forward_max"] > 0 and values["stage/backward_max"] > 0
    if layout is DP2:  # tensor-parallel ranks wait in the layer's collectives for a slow one
        assert values["straggler/rank"] == 1 and values["straggler/slowdown"] > 2
        assert values["stage/forward_max"] > SLOW_S > values["stage/forward_min"]
    assert first["collections"] == 2 and first["enabled"] == (False, True)
    profiled = {p.name for p in (tmp_path / "profile").iterdir()}
    assert profiled == {f"rank_{rank}.json.gz" for rank in {0, layout.ranks - 1}}
    with gzip.open(tmp_path / "profile" / "rank_0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert "fit finished at step 8: 8 steps in" in first["text"]
    assert f"last checkpoint: {tmp_path}/last.ckpt" in first["text"]
    assert "samples a second" in first["text"]


def _ended(layout: Layout, folder: str, save_last: bool) -> tuple[str, bool]:
    closing = ClosingSummary()
    fails = pl.callbacks.LambdaCallback(
        on_after_backward=lambda trainer, _: 1 / (2 - trainer.global_step)
    )
    keep = ModelCheckpoint(folder, "{step}", save_last=save_last, every_n_train_steps=1)
    trainer = layout.trainer(
        folder,
        callbacks=[closing, GarbageCollection(), fails, keep],
        max_steps=4,
        enable_checkpointing=True,
    )
    command = ["megatron-lightning", "fit", "--config=a.yaml"]
    with pytest.raises(ZeroDivisionError), mock.patch.object(sys, "argv", command):
        trainer.fit(ToyModule(), datamodule=layout.data_module())
    return closing.text, gc.isenabled()


@pytest.mark.parametrize("save_last", [False, True])
def test_an_exception_restores_the_collection_and_is_summed_up(
    save_last: bool, tmp_path: Path
) -> None:
    ((text, is_enabled),) = run(ONE, _ended, tmp_path, save_last)
    assert text.startswith("fit ended early (ZeroDivisionError) at step 2") and is_enabled
    newest = "last" if save_last else f"{tmp_path}/step=2.ckpt"  # without it, last finds nothing
    assert text.endswith(f"next: megatron-lightning fit --config=a.yaml --ckpt_path {newest}")


def test_a_checkpoint_that_could_not_be_saved_is_not_named(tmp_path: Path) -> None:
    closing = ClosingSummary()
    keep = ModelCheckpoint(
        tmp_path / "kept", monitor="train_loss", save_last=True, every_n_train_steps=1
    )
    fit = trainer(
        MegatronStrategy(),
        callbacks=[closing, keep],
        max_steps=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    command = ["megatron-lightning", "fit", "--config=a.yaml"]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(fit.strategy, "save_checkpoint", side_effect=full),
        pytest.raises(OSError, match="No space left"),
    ):
        fit.fit(ToyModule(), datamodule=ToyData())
    assert keep.best_model_path  # Lightning notes it before it saves
    assert closing.text.startswith("fit ended early (OSError) at step 1")
    assert "checkpoint" not in closing.text and "next:" not in closing.text


@pytest.mark.parametrize("val_batches", [0, 1])
def test_a_validation_is_proposed_if_there_are_validation_data(
    val_batches: int, tmp_path: Path
) -> None:
    closing, keep = ClosingSummary(), ModelCheckpoint(tmp_path, save_last=True)
    fit = trainer(
        MegatronStrategy(),
        callbacks=[closing, keep],
        max_steps=1,
        limit_val_batches=val_batches,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    with mock.patch.object(sys, "argv", ["megatron-lightning", "fit", "--config=a.yaml"]):
        fit.fit(ToyModule(), datamodule=ToyData())
    assert closing.text.startswith("fit finished at step 1")
    losses = re.search(r"\n  last losses: train_loss ([\d.]+)\n", closing.text)
    assert losses is not None
    assert float(losses[1]) == pytest.approx(float(fit.callback_metrics["train_loss"]), rel=1e-3)
    command = f"next: megatron-lightning validate --config=a.yaml --ckpt_path {tmp_path}/last.ckpt"
    assert closing.text.endswith(command) if val_batches else "next:" not in closing.text


def test_the_next_command_is_that_of_this_process() -> None:
    argv = ["megatron-lightning", "fit", "--config", "a b.yaml", "--ckpt_path", "x.ckpt"]
    again = "megatron-lightning fit --config 'a b.yaml' --ckpt_path y.ckpt"
    assert next_command(argv, False, "y.ckpt") == again
    assert next_command(argv, True, "y.ckpt").startswith("megatron-lightning validate --config")
    assert next_command(["train.py"], False, "y.ckpt") == ""


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GarbageCollection(0), "every_n_steps is 0"),
        (lambda: ProfilerWindow(-1), "first_step is -1 and num_steps is 3"),
        (lambda: StragglerMonitor(slowdown=1), "window is 5 and slowdown is 1"),
        (lambda: MemorySnapshot(max_entries=0), "max_entries is 0"),
    ],
)
def test_values_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_ranks_that_do_not_exist_are_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"ranks has \[3\], and the job has ranks 0 to 0"):
        ProfilerWindow(ranks=[3]).setup(trainer, torch.nn.Identity(), "fit")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="StragglerMonitor times the actions of MegatronStrategy"):
        StragglerMonitor().setup(trainer, torch.nn.Identity(), "fit")  # type: ignore[arg-type]
