"""A rank that sleeps holds the others up: it is named, with the stacks of all ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from megatron_lightning.callbacks import HangWatch, hang_watch
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.hangs import Hang, Timed
from megatron_lightning.resilience.stacks import Position, describe, main_stack, suspects
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import DP2, ONE, TP2_PP2, Layout, layouts, run

SLEEP_S = 3.0


class _Sleeps(pl.Callback):
    """One rank sleeps before a batch of training, or all in what has no limit."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank, self.where = rank, where

    def _sleep(self, trainer: pl.Trainer, where: str) -> None:
        if self.where == where and trainer.global_rank == self.rank:
            time.sleep(SLEEP_S)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (0, 3):
            self._sleep(trainer, f"batch {trainer.global_step}")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._sleep(trainer, "validation")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._sleep(trainer, "save")


def _hangs(layout: Layout, folder: str, where: str) -> dict[str, Any]:
    watch = HangWatch(factor=2, at_least=timedelta(seconds=1))
    trainer = layout.trainer(
        folder,
        callbacks=[watch, _Sleeps(layout.ranks - 1, where)],
        max_epochs=1,
        enable_checkpointing=where == "save",
        val_check_interval=2,
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return {
        "hangs": [(hang.headline, hang.text, hang.suspects) for hang in watch.hangs],
        "overhead": watch.overhead,
    }


@pytest.mark.spread(1)
@layouts(ONE, DP2, slow=[TP2_PP2])
def test_a_sleeping_rank_is_named(layout: Layout, tmp_path: Path) -> None:
    ranks = run(layout, _hangs, tmp_path, "batch 3")
    last, hangs = layout.ranks - 1, [hang for rank in ranks for hang in rank["hangs"]]
    # On a busy machine another step may take a second as well.
    headline, text, found = next(hang for hang in hangs if "_Sleeps._sleep" in hang[1])
    assert found == [last] and "has ended no batch for" in headline, (headline, text)
    first = text.splitlines()
    assert first[0].startswith(f"  rank {last} waits for nobody, in training after step 3"), text
    assert "_Sleeps._sleep" in first[1], text
    if layout.ranks > 1:
        assert f"the others wait for rank {last}" in headline
        assert "wait for other ranks" in text or "waits for other ranks" in text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["batch 0", "validation", "save"])
def test_what_takes_its_own_time_is_no_hang(where: str, tmp_path: Path) -> None:
    for rank in run(DP2, _hangs, tmp_path, where):
        assert rank["hangs"] == [], where


def test_ranks_are_grouped_by_what_they_do() -> None:
    def at(rank: int, *stack: str, number: int = 5) -> Position:
        return Position(rank, 7, "training", 9.0, list(stack), {"tp": (number, "all_reduce [4]")})

    waiting = "all_reduce (torch/distributed/distributed_c10d.py:1)"
    positions = [at(0, waiting), at(1, waiting), at(2, "mine (train.py:3)", number=4)]
    text = describe(positions, silent=[3])
    assert text.splitlines() == [
        "  rank 2 waits for nobody, in training after step 7:",
        "      mine (train.py:3)",
        "  ranks 0, 1 wait for other ranks, in training after step 7:",
        f"      {waiting}",
        "  group tp of ranks 0, 1, 2: rank 2 behind, at collective 4; rank 0 waits in 5, "
        "all_reduce [4]",
        "  no answer from rank 3: killed, stopped, or their node is gone",
    ]
    assert suspects(positions, [3]) == [3, 2]
    assert at(0, "compile (torch/_dynamo/convert_frame.py:1)").compiles


@pytest.mark.slow
def test_a_collective_in_compiled_code_is_no_compilation() -> None:
    stacks: dict[str, list[str]] = {}

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        def nested(depth: int) -> list[str]:
            return nested(depth - 1) if depth else main_stack()

        stacks["compiler"] = nested(200)  # a compiler's own frames
        return graph.forward

    @torch.compiler.disable  # as torch does for the kernels of custom operators
    def collective(x: Tensor) -> Tensor:
        stacks["collective"] = main_stack()
        return x

    torch.compile(lambda x: collective(x + 1) * 2, backend=compiler)(torch.ones(2))
    found = {name: Position(0, 7, "training", 9.0, stack) for name, stack in stacks.items()}
    assert any("torch/_dynamo/" in frame for frame in stacks["collective"])
    assert found["compiler"].compiles and not found["collective"].compiles


def test_limits_that_every_batch_passes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"factor is 1 and at_least is 0:05:00: every batch"):
        HangWatch(factor=1)
    with pytest.raises(ConfigError, match=r"action is 'end'; it must be one of"):
        HangWatch(action="end")  # type: ignore[arg-type]


class _SlowDisk(pl.Callback):
    """The disk stands still in one save, or the whole setup or validation does."""

    def __init__(self, where: str, step: int = 1) -> None:
        self.where, self.step = where, step

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.where == "setup":
            time.sleep(SLEEP_S / 2)

    def on_validation_epoch_end(self, *_: Any) -> None:
        if self.where == "validation":
            time.sleep(SLEEP_S / 2)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.where not in {"save", "writing"} or trainer.global_step != self.step:
            return
        real = os.fsync

        def waits(descriptor: int) -> None:
            os.fsync = real
            time.sleep(SLEEP_S / 2)
            real(descriptor)

        os.fsync = waits


def _hangs_in(layout: Layout, folder: str, where: str) -> list[tuple[str, str]]:
    limits = {"save" if where == "writing" else where: timedelta(seconds=0.4)}
    watch = HangWatch(at_least=timedelta(seconds=60), sections=limits)
    options = CheckpointOptions(async_save=where == "writing")
    fit = trainer(
        layout.strategy(checkpoint_options=options),
        default_root_dir=folder,
        callbacks=[watch, _SlowDisk(where), ModelCheckpoint(folder, every_n_train_steps=1)],
        max_steps=3,
        enable_checkpointing=True,
        val_check_interval=2,
    )
    fit.fit(ToyModule(), datamodule=layout.data_module())
    return [(hang.headline, hang.text) for hang in watch.hangs]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("where", "headline", "activity", "frame"),
    [
        ("setup", "has been in the setup for", "in the setup", "on_fit_start"),
        ("save", "has been in a save for", "in a save", "waits"),
        ("writing", "has been writing a save for", "in the writing of a save", "waits"),
        ("validation", "has been in one validation for", "in a validation", "on_validation"),
    ],
)
def test_sections_have_limits(
    where: str, headline: str, activity: str, frame: str, tmp_path: Path
) -> None:
    (found,) = run(ONE, _hangs_in, tmp_path, where)
    line, text = found[0]
    assert headline in line and "(limit 0.4 s)" in line, line
    assert activity in text and frame in text, text


def test_limits_of_sections_are_learned() -> None:
    save = Timed("save", "been in a save", at_first_s=5.0)
    save.begin(10.0)
    assert save.limit_s(factor=10.0, at_least_s=1.0) == 5.0
    save.end(12.0)
    assert save.limit_s(factor=10.0, at_least_s=1.0) == 20.0
    assert save.limit_s(factor=10.0, at_least_s=60.0) == 60.0
    save.begin(20.0)
    save.patience = 2  # after an alarm
    assert save.limit_s(factor=10.0, at_least_s=1.0) == 40.0
    save.end(21.0)
    assert save.limit_s(factor=10.0, at_least_s=1.0) == 20.0


def test_a_section_without_a_limit_of_the_user_never_stops_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(hang_watch, "end_process", lambda finalize: ended.append(True))
    hour = timedelta(hours=1)
    for sections, is_section, count in (
        (None, True, 0),
        (None, False, 1),
        ({"save": hour}, True, 2),
    ):
        watch = HangWatch(action="stop", sections=sections)  # type: ignore[arg-type]
        watch._found(trainer(), Hang("hang", "", [], is_section))
        assert len(watch.hangs) == 1 and len(ended) == count, (sections, is_section)


def test_sections_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sections has 'load': 0:01:00.*Set the sections of"):
        HangWatch(sections={"load": timedelta(minutes=1)})  # type: ignore[dict-item]
