"""Bars of the command line end with the last step of the run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from megatron_lightning.callbacks.progress.progress_bars import count_to_max_steps
from megatron_lightning.callbacks.progress.progress_lines import ProgressLines, use_lines_in_files
from megatron_lightning.callbacks.progress.short_runs import LogShortRuns, num_steps
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer


class _Totals(pl.Callback):
    """Totals of the bar, which it takes when epochs begin, or, in an epoch resumed in the middle,
    when the first batch ends.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.of_epochs: list[float] = []
        self.of_batches: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.of_epochs.append(self.bar.total_train_batches)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.of_batches.append(self.bar.total_train_batches)
        if trainer.global_step == 10:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "inside.ckpt")


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bars_end_at_max_steps(kind: type[ProgressBar], tmp_path: Path) -> None:
    """Four batches an epoch: the run ends in the middle of the third, and resumes there."""

    def fit(max_steps: int, path: str | None, **options: Any) -> _Totals:
        bar = kind()
        count_to_max_steps(bar)
        totals = _Totals(bar)
        run = trainer(
            MegatronStrategy(), max_steps=max_steps, max_epochs=-1, enable_progress_bar=True,
            limit_train_batches=4, callbacks=[bar, totals], default_root_dir=tmp_path, **options,
        )  # fmt: skip
        run.fit(ToyModule(), datamodule=ToyData(batch_size=4), ckpt_path=path)
        if path is None:
            run.save_checkpoint(tmp_path / "mid.ckpt")
        return totals

    whole = fit(10, None)
    assert whole.of_epochs == [4, 4, 2]
    assert whole.of_batches == [4] * 8 + [2] * 2
    # The third epoch goes on: an uninterrupted run has one start of it, and this run the rest.
    resumed = fit(13, str(tmp_path / "mid.ckpt"))
    assert (resumed.of_epochs, resumed.of_batches) == ([1], [4, 4, 1])
    assert fit(12, str(tmp_path / "inside.ckpt")).of_batches == [4, 4]
    accumulated = fit(3, None, accumulate_grad_batches=2)
    assert accumulated.of_epochs == [4, 2]
    assert accumulated.of_batches == [4] * 4 + [2] * 2


def test_other_bars_are_left_alone() -> None:
    class Own(TQDMProgressBar):
        pass

    bar = Own()
    count_to_max_steps(bar)
    count_to_max_steps(None)
    assert type(bar) is Own


def test_a_file_gets_lines_instead_of_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(bar: ProgressBar, is_terminal: bool) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
        added = use_lines_in_files(bar)
        assert len(added) == (not is_terminal)
        run = trainer(
            MegatronStrategy(),
            max_steps=2,
            callbacks=[bar, *(ProgressLines(interval_s=0.0) for _ in added)],
            enable_progress_bar=True,
            default_root_dir=tmp_path,
        )
        run.fit(ToyModule(), datamodule=ToyData())
        return capsys.readouterr().out

    assert "\r" in fit(TQDMProgressBar(), True)
    for bar in (TQDMProgressBar(), RichProgressBar()):
        lines = fit(bar, False).strip().split("\n")
        # The first value is logged behind the first line.
        assert [line.rpartition(" ")[0] for line in lines] == [
            f"epoch 0, step {step} of 2; losses: {name}"
            for step, name in ((1, "loss"), (2, "train_loss"))
        ]


@pytest.mark.parametrize(
    ("options", "steps", "every"),
    [
        ({"max_steps": 99}, 99, 1),
        ({"max_steps": 100}, 100, 50),
        ({"max_epochs": 3, "limit_train_batches": 4}, 12, 1),
        ({"max_epochs": 3, "limit_train_batches": 3, "accumulate_grad_batches": 2}, 6, 1),
        ({"max_epochs": 50, "limit_train_batches": 4}, 200, 50),
        ({"max_epochs": -1}, math.inf, 50),
    ],
)
def test_short_runs_log_every_step(options: dict[str, Any], steps: float, every: int) -> None:
    run = trainer("auto", **options)
    run.fit_loop.max_batches = options.get("limit_train_batches", math.inf)
    assert num_steps(run) == steps
    LogShortRuns().on_train_start(run, ToyModule())
    assert vars(run)["log_every_n_steps"] == every
