"""Starts of one run: one log, a count, an end where nothing is gained, the same global batch."""

from __future__ import annotations

import csv
import json
import os
import random
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from megatron_lightning.config.global_batch import StepSize, replica_batch_size
from megatron_lightning.errors import ConfigError, NoProgressError
from megatron_lightning.modules import PretrainDataModule
from megatron_lightning.recipe_reading.plan_command import plan
from megatron_lightning.resilience.lifecycle.start_record import check_progress
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import DP2, ONE, PP2, TP2_PP2, Layout, layouts, run


class _Fails(pl.Callback):
    """Raises once a number of steps is done, as a machine that breaks."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def _fit(layout: Layout, folder: str, fails_at: int = -1, **more: Any) -> pl.Trainer:
    keep = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "board")]
    trainer = layout.trainer(
        folder,
        callbacks=[keep, _Fails(fails_at)],
        logger=loggers,
        log_every_n_steps=1,
        max_epochs=2,
        enable_checkpointing=True,
        **more,
    )
    try:
        trainer.fit(ToyModule(), datamodule=layout.data_module(), ckpt_path="last")
    except SystemExit:
        for logger in loggers:
            logger.finalize("failed")
    return trainer


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "csv" / "version_0" / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["train_loss_step"]]


def _start(layout: Layout, folder: str, fails_at: int = -1) -> tuple[int, int]:
    """Start a job; return the step that it reaches, and how many starts there were."""
    trainer = _fit(layout, folder, fails_at)
    return trainer.global_step, trainer.strategy.starts.number


def _board(folder: Path) -> list[int]:
    """Return the steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return [event.step for event in board.Scalars("train_loss_step")]


@pytest.mark.slow
@layouts(PP2, slow=[ONE, DP2, TP2_PP2])
def test_a_run_has_one_log_over_its_restarts(layout: Layout, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(layout, _start, whole)
    assert run(layout, _start, tmp_path, 3)[0] == (3, 1)
    assert run(layout, _start, tmp_path)[0] == (8, 2)  # from the checkpoint of step 2
    rows = _rows(tmp_path)
    assert [row["train_loss_step"] for row in rows] == [
        row["train_loss_step"] for row in _rows(whole)
    ]
    assert [int(row["step"]) for row in rows] == list(range(8))  # trained twice, and there once
    assert os.listdir(tmp_path / "csv") == os.listdir(tmp_path / "board") == ["version_0"]
    assert _board(tmp_path / "board" / "version_0") == list(range(8))
    starts = json.loads((tmp_path / "starts.json").read_text())["starts"]
    assert [(s["from_step"], s["reached_step"]) for s in starts] == [(0, 3), (2, 8)]


class _Drawing(CSVLogger):
    """Draws the name of its run, as MLflow does on rank 0."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            random.random(), torch.rand(1)
        return super().experiment


def _with_drawn_name(layout: Layout, folder: str) -> int:
    trainer = layout.trainer(folder, logger=_Drawing(folder), max_steps=2)
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return trainer.global_step


def test_a_tracker_may_draw_the_name_of_a_run(tmp_path: Path) -> None:
    assert run(PP2, _with_drawn_name, tmp_path) == [2, 2]


def _starts_again_and_again(layout: Layout, folder: str, gains: bool) -> tuple[int, str]:
    started = 0
    for attempt in range(4):
        with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=str(attempt)):
            try:
                _fit(layout, folder, fails_at=3 + (attempt if gains else 0))
            except NoProgressError as error:
                return started, str(error)
        started += 1
    return started, ""


def test_a_launcher_s_restarts_end_where_nothing_is_gained(tmp_path: Path) -> None:
    ((started, message),) = run(ONE, _starts_again_and_again, tmp_path / "bug", False)
    # The first start began at step 0, the three others at step 2.
    assert started == 3 and "started 3 times from step 2 and ended at step 3 each time" in message
    assert run(ONE, _starts_again_and_again, tmp_path / "machine", True) == [(4, "")]


@pytest.mark.parametrize(
    ("ended", "is_refused"),
    [((8, 8), True), ((9, 8), False), ((8, 9), False), ((8,), False)],
)
def test_only_ends_at_an_equal_step_count(ended: tuple[int, ...], is_refused: bool) -> None:
    starts = [{"from_step": 2, "reached_step": s, "automatic": True} for s in (*ended, 2)]
    with pytest.raises(NoProgressError) if is_refused else nullcontext():
        check_progress(starts)
    check_progress([{**s, "automatic": False} for s in starts])


def _sizes(devices: Any, num_nodes: int, **environment: str) -> tuple[int, int]:
    defaults = {
        "TORCHELASTIC_RUN_ID": "job", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0",
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    with mock.patch.dict(os.environ, {**defaults, **environment}):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            num_nodes=num_nodes,
            strategy=MegatronStrategy(),
            logger=False,
            enable_checkpointing=False,
        )
        return trainer.num_devices, trainer.num_nodes


def test_sizes_that_are_not_set_are_torchruns() -> None:
    assert _sizes("auto", 1) == (2, 2)
    assert _sizes(2, 1) == (2, 2)
    assert _sizes(2, 2) == (2, 2)
    assert _sizes(1, 1) == (1, 1)  # a Trainer beside the job
    assert _sizes("auto", 1, WORLD_SIZE="2", GROUP_WORLD_SIZE="1") == (2, 1)


def test_a_global_batch_is_divided_among_the_ranks() -> None:
    assert replica_batch_size(24, 3, 2) == 4
    with pytest.raises(ConfigError, match=r"global_batch_size=10 .* 4 data-parallel ranks.* to 8,"):
        replica_batch_size(10, 4)
    with pytest.raises(ConfigError, match=r"batch_size is 2 and global_batch_size is 4"):
        PretrainDataModule("data", 8, 2, global_batch_size=4)
    with pytest.raises(ConfigError, match=r"batch_size is None and global_batch_size is None"):
        PretrainDataModule("data", 8)


def test_another_number_of_ranks_keeps_a_step() -> None:
    before = StepSize(num_replicas=4, batch_size=2, accumulated=1)
    assert StepSize(2, 2, 1).accumulated_as(before) == 2
    assert StepSize(2, 4, 1).accumulated_as(before) is None  # the user's
    with pytest.raises(ConfigError, match=r"8 samples .* 3 ranks x batch_size 2 do not divide"):
        StepSize(3, 2, 1).accumulated_as(before)


def _step_sizes(layout: Layout, folder: str, fails_at: int) -> list[Any]:
    """Train with a loader of 4 samples a rank; on a resume the number of ranks is torchrun's."""
    record, keep = Losses(), ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    trainer = layout.trainer(
        folder, callbacks=[record, keep, _Fails(fails_at)], max_steps=6, enable_checkpointing=True
    )
    vars(trainer.strategy)["is_sized_by_launcher"] = True
    data = layout.data_module(batch_size=4, num_samples=64)
    with suppress(SystemExit):
        trainer.fit(ToyModule(), datamodule=data, ckpt_path="last")
    return [trainer.accumulate_grad_batches, trainer.strategy.consumed_samples, record.norms]


@pytest.mark.slow
def test_fewer_ranks_accumulate_more_batches(tmp_path: Path) -> None:
    whole, _ = run(DP2, _step_sizes, tmp_path / "whole", -1)
    run(DP2, _step_sizes, tmp_path, 2)
    (rest,) = run(ONE, _step_sizes, tmp_path, -1)
    assert rest[:2] == [2, 6 * 8] and whole[:2] == [1, 6 * 8]
    # fp32, other partial sums; AdamW amplifies the last bits of small gradients.
    torch.testing.assert_close(rest[2], whole[2][-len(rest[2]) :], rtol=1e-5, atol=1e-6)


def test_a_plan_knows_the_global_batch(tmp_path: Path) -> None:
    text = Path("configs/gpt2_small.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("batch_size: 64", "global_batch_size: 512"))
    assert plan(config=str(recipe)) == plan(config="configs/gpt2_small.yaml")
    output, is_valid = plan(config=str(recipe), overrides=["data.global_batch_size=500"])
    assert not is_valid and "global_batch_size=500 is not a multiple of 8" in output
