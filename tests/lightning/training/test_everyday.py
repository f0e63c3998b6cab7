"""An ordinary run with the callbacks and loggers that people use: all of it equals one device, on
every rank.

One run for each layout (training, validation, early stopping, checkpoints, learning rates,
loggers); each test looks at a part.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    SINGLE,
    TP2_PP2,
    Layout,
    assert_close,
    mean_over_ranks,
    metrics_of,
    run,
)

LAYOUTS = [
    PP2,
    DP2,
    PP2_DP2,
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in (MICRO, TP2_PP2)),
]


class _Module(ToyModule):
    """Writes to the logger's own writer inside the step, as users do, and computes a metric at the
    epoch's end."""

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> dict[str, torch.Tensor]:
        output = super().training_step(batch, batch_idx)
        self.loggers[0].experiment.add_scalar("direct", output["loss"].item(), self.global_step)
        return output

    def on_validation_epoch_end(self) -> None:
        self.log("computed_acc", self.val_acc.compute(), sync_dist=True)


def _everyday(layout: Layout, folder: str) -> dict[str, Any]:
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.4)
    best = ModelCheckpoint(
        f"{folder}/ckpt",
        "{epoch}-{step}-{val_loss:.3f}",
        monitor="val_loss",
        save_top_k=2,
        save_last="link",
        auto_insert_metric_name=True,
    )
    record, rates = Losses(), LearningRateMonitor(logging_interval="step")
    trainer = layout.trainer(
        folder,
        max_epochs=5,
        callbacks=[stop, best, record, rates],
        enable_checkpointing=True,
        logger=[
            TensorBoardLogger(folder, name="tb", version=0),
            CSVLogger(folder, name="csv", version=0),
        ],
        log_every_n_steps=1,
    )
    trainer.fit(_Module(), datamodule=layout.data_module())
    return {
        "losses": record.losses,
        "norms": record.norms,
        "metrics": metrics_of(trainer),
        "stopped": (
            stop.stopped_epoch,
            trainer.current_epoch,
            trainer.global_step,
            float(stop.best_score),
        ),
        "best": (os.path.basename(best.best_model_path), float(best.best_model_score)),
        "last": os.path.basename(best.last_model_path),
        "top": {os.path.basename(path): float(score) for path, score in best.best_k_models.items()},
        "rates": dict(rates.lrs),
    }


class _Run:
    def __init__(self, layout: Layout, folder: Path) -> None:
        self.layout, self.folder = layout, folder
        self.ranks = run(layout, _everyday, folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    return _Run(SINGLE, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Run:
    return _Run(request.param, tmp_path_factory.mktemp(request.param.name))


def test_the_run_is_worth_comparing(plain: _Run) -> None:
    result = plain.ranks[0]
    assert 2 <= result["stopped"][1] < 5, "early stopping should end the run"
    assert result["losses"][-1] < 0.6 * result["losses"][0]
    assert len(result["top"]) == 2


@pytest.mark.spread(1)
def test_losses_and_gradient_norms(plain: _Run, ours: _Run) -> None:
    expected = plain.ranks[0]
    assert_close(mean_over_ranks([rank["losses"] for rank in ours.ranks]), expected["losses"])
    for rank in ours.ranks:
        assert_close(rank["norms"], expected["norms"])


@pytest.mark.spread(1)
def test_callback_metrics_on_every_rank(plain: _Run, ours: _Run) -> None:
    """Among them torchmetrics (val_acc, train_mean) and a metric computed in
    on_validation_epoch_end."""
    assert {"val_acc", "train_mean", "computed_acc", "tokens", "train_loss_epoch"} <= plain.ranks[
        0
    ]["metrics"].keys()
    for rank in ours.ranks:
        actual, expected = dict(rank["metrics"]), dict(plain.ranks[0]["metrics"])
        # Lightning's DDP: a sum over the epoch is a sum over ranks as well.
        if ours.layout.data > 1:
            assert actual.keys() == expected.keys()
        assert_close(actual, expected)


@pytest.mark.spread(1)
def test_early_stopping(plain: _Run, ours: _Run) -> None:
    for rank in ours.ranks:
        assert_close(rank["stopped"], plain.ranks[0]["stopped"])


@pytest.mark.spread(1)
def test_checkpoints(plain: _Run, ours: _Run) -> None:
    names = sorted(path.name for path in (plain.folder / "ckpt").iterdir())
    assert sorted(path.name for path in (ours.folder / "ckpt").iterdir()) == names
    assert (ours.folder / "ckpt" / "last.ckpt").is_symlink()
    assert os.readlink(ours.folder / "ckpt" / "last.ckpt") == os.readlink(
        plain.folder / "ckpt" / "last.ckpt"
    )
    for rank in ours.ranks:
        for key in ("best", "last", "top"):
            assert_close(rank[key], plain.ranks[0][key])


@pytest.mark.spread(1)
def test_learning_rates(plain: _Run, ours: _Run) -> None:
    for rank in ours.ranks:
        assert rank["rates"] == plain.ranks[0]["rates"]


def _tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tb" / "version_0")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.spread(1)
def test_tensorboard(plain: _Run, ours: _Run) -> None:
    expected, actual = _tensorboard(plain.folder), _tensorboard(ours.folder)
    direct, expected_direct = actual.pop("direct"), expected.pop("direct")
    assert {"val_loss", "train_loss_step", "lr-AdamW"} <= expected.keys()
    if ours.layout.data > 1:  # a step's value is rank 0's; everything else is synchronised
        actual["train_loss_step"], expected["train_loss_step"] = [], []
    assert_close(actual, expected)
    assert sorted({step for step, _ in direct}) == sorted({step for step, _ in expected_direct})
    if ours.layout.data == 1:
        num = len(direct) // len(expected_direct)
        means = [
            sum(value for _, value in direct[i : i + num]) / num for i in range(0, len(direct), num)
        ]
        # Item() in the file is fp32 per micro-batch.
        assert_close(means, [value for _, value in expected_direct], 1e-4)


@pytest.mark.spread(1)
def test_csv(plain: _Run, ours: _Run) -> None:
    def rows(folder: Path) -> list[dict[str, str]]:
        with open(folder / "csv" / "version_0" / "metrics.csv") as file:
            return list(csv.DictReader(file))

    expected, actual = rows(plain.folder), rows(ours.folder)
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if ours.layout.data > 1 and key == "train_loss_step":
                continue
            assert bool(mine[key]) == bool(value)
            if value:
                assert_close(float(mine[key]), float(value))


class _Displayed(pl.callbacks.ProgressBar):
    """Keeps what is displayed."""

    def __init__(self) -> None:
        super().__init__()
        self.displayed: list[dict[str, Any]] = []

    def get_metrics(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, module)
        self.displayed.append({name: float(value) for name, value in metrics.items()})
        return metrics


class _Bar(_Displayed, pl.callbacks.TQDMProgressBar):
    pass


class _RichBar(_Displayed, pl.callbacks.RichProgressBar):
    pass


def _displayed(layout: Layout, folder: str, rich: bool) -> dict[str, Any]:
    bar = _RichBar() if rich else _Bar()
    trainer = layout.trainer(
        folder, max_epochs=1, limit_train_batches=3, callbacks=[bar], enable_progress_bar=True
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return {"displayed": bar.displayed, "total": bar.total_train_batches, "enabled": bar.is_enabled}


@pytest.mark.spread(1)
@pytest.mark.parametrize("rich", [False, True], ids=["tqdm", "rich"])
def test_progress_bars(rich: bool, tmp_path: Path) -> None:
    expected = run(SINGLE, _displayed, tmp_path, rich)[0]
    ranks = run(PP2, _displayed, tmp_path, rich)
    assert len(expected["displayed"]) > 3
    assert_close(ranks[0], expected)
    assert not ranks[1]["enabled"], "only rank 0 shows a bar"
