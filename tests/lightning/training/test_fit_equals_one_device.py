"""A pipeline logs, keeps checkpoints, reads several loaders and ends epochs as one device does.

Every body runs under plain Lightning first; nothing is compared with constants.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.helpers.toy import VOCABULARY, ToyData, ToyModule, samples
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DP2,
    MICRO,
    PP2,
    History,
    Layout,
    Lines,
    assert_close,
    layouts,
    metrics_of,
    run,
    single,
)


class _Logs(ToyModule):
    """Logs with every option, in every step, for one and for two loaders.

    Largest and smallest are of samples: of losses they would be those of micro-batches, which one
    device does not have.
    """

    def __init__(self) -> None:
        super().__init__()
        kinds = {
            "acc": MulticlassAccuracy(VOCABULARY, average="micro"),
            "f1": MulticlassF1Score(VOCABULARY, average="micro"),
        }
        self.collection = MetricCollection(kinds, prefix="c_")
        self.largest = MaxMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, logits = self._loss(batch)
        ids = batch["ids"].float()
        for name, value in {
            "mean": ids.mean(),
            "max": ids.max(),
            "min": ids.min(),
            "sum": ids.sum(),
        }.items():
            self.log(name, value, reduce_fx=name, on_step=True, on_epoch=True)
        self.log("callable", ids.amax(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        self.log("bar_of_epoch", loss, prog_bar=True, logger=True, on_step=False, on_epoch=True)
        self.log("logger", loss, on_step=True, on_epoch=True)
        self.log("nowhere", loss, logger=False, on_epoch=True)
        self.log("number", batch_idx + 1, on_step=True, on_epoch=True)
        self.log("tokens", loss, batch_size=ids.numel(), on_step=False, on_epoch=True)
        self.log("zero", loss, rank_zero_only=True)
        self.collection(logits.flatten(0, 1), batch["tgt"].flatten())
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        self.largest(ids.max())
        self.log("largest", self.largest, on_step=True, on_epoch=False)
        return loss

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loss, logits = self._loss(batch)
        self.log("val", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.val_acc(logits.flatten(0, 1), batch["tgt"].flatten())
        self.log("val_acc", self.val_acc, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log_dict(
            {"epoch_end": float(self.current_epoch), "c_own": self.collection.compute()["c_acc"]}
        )

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", self.global_step)


class _TwoLengths(ToyData):
    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self._loader(32, 2), self._loader(16, 3)]


def _logging(layout: Layout, folder: str) -> dict[str, Any]:
    lines, history = Lines(), History()
    trainer = layout.trainer(
        folder,
        max_epochs=2,
        logger=lines,
        callbacks=[history],
        log_every_n_steps=2,
        num_sanity_val_steps=1,
        val_check_interval=2,
    )
    module = _Logs()
    trainer.fit(module, datamodule=_TwoLengths(8, 29))  # the last batch is smaller
    validated = trainer.validate(module, datamodule=_TwoLengths(8, 29), verbose=False)
    return {
        "lines": lines.lines,
        "seen": history.seen,
        "validated": validated,
        "metrics": metrics_of(trainer),
    }


@pytest.mark.slow
@layouts(PP2, MICRO)
def test_logging_options(layout: Layout, tmp_path: Path) -> None:
    expected = single(_logging)
    for index, rank in enumerate(run(layout, _logging, tmp_path)):
        # As under Lightning's own strategies: loggers write, and rank_zero_only logs, on rank 0.
        if index:
            rank["lines"] = expected["lines"]
            rank["seen"] = [
                _with_zero(mine, theirs)
                for mine, theirs in zip(rank["seen"], expected["seen"], strict=True)
            ]
        assert_close(rank, expected)


def _with_zero(
    mine: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    return {
        kind: values | {k: v for k, v in theirs[kind].items() if k == "zero"}
        for kind, values in mine.items()
    }


_KEEPS: dict[str, dict[str, Any]] = {
    "best": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "worst": {
        "monitor": "train_loss_epoch",
        "mode": "max",
        "save_top_k": 1,
        "save_on_train_epoch_end": True,
    },
    "steps": {"every_n_train_steps": 3, "save_top_k": -1, "save_last": "link"},
    "time": {"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
    "weights": {"save_weights_only": True, "every_n_epochs": 2, "save_top_k": -1},
    "last": {"save_top_k": 0, "save_last": True, "every_n_epochs": 3},
    "versions": {"filename": "same", "save_top_k": -1, "every_n_epochs": 1},
    "overwritten": {
        "filename": "same",
        "save_top_k": 1,
        "every_n_train_steps": 5,
        "enable_version_counter": False,
    },
    "newest": {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2},
}


def _checkpoints(layout: Layout, folder: str) -> dict[str, Any]:
    keeps = {
        name: ModelCheckpoint(f"{folder}/{name}", **{"filename": "{epoch}-{step}", **o})
        for name, o in _KEEPS.items()
    }
    trainer = layout.trainer(
        folder,
        max_epochs=3,
        callbacks=[*keeps.values()],
        enable_checkpointing=True,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    results = {}
    for name, keep in keeps.items():
        state = {key: value for key, value in keep.state_dict().items() if key != "dirpath"}
        results[name] = {
            "files": sorted(os.listdir(f"{folder}/{name}")),
            "state": {key: _relative(value, folder) for key, value in state.items()},
        }
    tested = trainer.test(ckpt_path="best", datamodule=layout.data_module(), verbose=False)
    return {"keeps": results, "best": _relative(trainer.ckpt_path, folder), "tested": tested}


def _relative(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {_relative(key, folder): _relative(item, folder) for key, item in value.items()}
    if isinstance(value, Tensor):
        return float(value)
    return (
        os.path.relpath(value, folder)
        if isinstance(value, str) and value.startswith("/")
        else value
    )


@pytest.mark.slow
@layouts(PP2, DP2, MICRO)
def test_what_model_checkpoints_keep(layout: Layout, tmp_path: Path) -> None:
    expected = single(_checkpoints)
    assert len(expected["keeps"]["time"]["files"]) > 5
    for rank in run(layout, _checkpoints, tmp_path):
        assert_close(rank, expected)


class _Joined(ToyModule):
    """Trains on batches of several loaders, of which some may be at their end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, tuple):  # sequential: batch, index, loader
            batch = {"a": batch[0]}
        parts = [part for part in batch.values() if part is not None]
        loss, _ = self._loss(
            {key: torch.cat([part[key] for part in parts]) for key in ("ids", "tgt")}
        )
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        return super().validation_step(batch, batch_idx)

    def predict_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        return super().predict_step(batch, batch_idx) + dataloader_idx


def _loader(num: int, seed: int) -> DataLoader[Any]:
    return DataLoader(samples(num, seed), batch_size=8)


def _combined(layout: Layout, folder: str, mode: str) -> dict[str, Any]:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=2, callbacks=[record])
    module, loaders = _Joined(), CombinedLoader({"a": _loader(32, 1), "b": _loader(16, 2)}, mode)
    trainer.fit(
        module,
        train_dataloaders=loaders,
        val_dataloaders={"x": _loader(16, 3), "y": [_loader(8, 4)]},
    )
    predicted = trainer.predict(module, [_loader(16, 5), _loader(12, 6)])
    kept = trainer.predict(module, _loader(8, 5), return_predictions=False)
    batches = (trainer.num_training_batches, trainer.num_val_batches)
    return {
        "losses": record.losses,
        "metrics": metrics_of(trainer),
        "batches": batches,
        "predicted": predicted,
        "kept": kept,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "max_size",
        "min_size",
        "max_size_cycle",
    ],
)
@layouts(PP2, MICRO)
def test_several_loaders(layout: Layout, mode: str, tmp_path: Path) -> None:
    expected = single(_combined, mode)
    for rank in run(layout, _combined, tmp_path, mode):
        assert_close(rank, expected)


class _Skips(ToyModule):
    """Skips the rest of an epoch in one hook, and the epochs that are left in another."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.current_epoch == 2


class _Outputs(pl.Callback):
    """Record what callbacks get after a batch, and whether the module is in training mode."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.seen.append(
            (
                index,
                module.training,
                None if outputs is None else {k: float(v) for k, v in outputs.items()},
            )
        )

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.seen.append((index, module.training, float(outputs)))


def _skipping(layout: Layout, folder: str) -> dict[str, Any]:
    outputs, lines = _Outputs(), Lines()
    callbacks = [outputs, LearningRateMonitor(), DeviceStatsMonitor(cpu_stats=False)]
    trainer = layout.trainer(
        folder, max_epochs=5, min_epochs=2, callbacks=callbacks, logger=lines, log_every_n_steps=1
    )
    trainer.fit(_Skips(), datamodule=layout.data_module())
    for seen in outputs.seen:
        # Exp of a micro-batch's loss: its mean is another number than exp of the mean.
        if isinstance(seen[2], dict):
            seen[2].pop("ppl", None)
    return {
        "outputs": outputs.seen,
        "lines": [
            (step, {k: v for k, v in line.items() if "lr" in k or "loss" in k})
            for step, line in lines.lines
        ],
        "metrics": metrics_of(trainer),
        "end": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
    }


@pytest.mark.slow
@layouts(PP2, MICRO)
def test_skipped_batches_and_epochs(layout: Layout, tmp_path: Path) -> None:
    expected = single(_skipping)
    for index, rank in enumerate(run(layout, _skipping, tmp_path)):
        if index:
            rank["lines"] = expected["lines"]
        assert_close(rank, expected)
