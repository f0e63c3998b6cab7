"""Logs of several runs in one folder: a run continues its own log, and no data are deleted."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from megatron_lightning.resilience.lifecycle.csv_rows import CsvRows
from megatron_lightning.strategies.megatron import MegatronStrategy


class _Module(pl.LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: list[Tensor]) -> Tensor:
        output: Tensor = self.layer(x[0])
        return output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class _Validated(_Module):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self(batch).square().mean())


def _fit(
    root: Path,
    steps: int,
    checkpoints: str = "a",
    path: str | None = "last",
    version: int | None = None,
    **hyper_parameters: int,
) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=MegatronStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=CSVLogger(root, version=version),
        callbacks=[ModelCheckpoint(root / checkpoints, save_last=True)],
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), batch_size=1)
    trainer.fit(_Module(**hyper_parameters), loader, ckpt_path=path)
    return trainer


def _steps(file: Path) -> list[int]:
    with open(file, newline="") as text:
        return [int(row["step"]) for row in csv.DictReader(text)]


def _logs(root: Path) -> dict[str, list[int]]:
    """Return the steps in every file with rows."""
    folder = root / "lightning_logs"
    files = sorted(folder.glob("*/metrics.csv*"))
    return {str(file.relative_to(folder)): _steps(file) for file in files}


def test_runs_in_one_folder_have_logs_of_their_own(tmp_path: Path) -> None:
    _fit(tmp_path, 4, "a")
    _fit(tmp_path, 2, "b")  # "last" finds no checkpoint
    expected = {"version_0/metrics.csv": [0, 1, 2, 3], "version_1/metrics.csv": [0, 1]}
    assert _logs(tmp_path) == expected
    _fit(tmp_path, 6, "a")
    _fit(tmp_path, 3, "b")
    expected = {"version_0/metrics.csv": [*range(6)], "version_1/metrics.csv": [0, 1, 2]}
    assert _logs(tmp_path) == expected
    # A copy in another folder is a new run.
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "a", other / "a")
    _fit(other, 7, "a")
    assert _logs(tmp_path) == expected
    assert _logs(other) == {"version_0/metrics.csv": [6]}
    # A start without the checkpoints of the run cannot know the run.
    shutil.rmtree(tmp_path / "a")
    _fit(tmp_path, 1, "a")
    assert _logs(tmp_path) == {**expected, "version_2/metrics.csv": [0]}


def test_branches_from_one_checkpoint_keep_all_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _fit(tmp_path, 2)
    begin = str(tmp_path / "begin.ckpt")
    trainer.save_checkpoint(begin)
    log = "version_0/metrics.csv"
    _fit(tmp_path, 5, path=begin)
    assert _logs(tmp_path) == {log: [0, 1, 2, 3, 4]}
    assert "rows of later steps" not in caplog.text
    _fit(tmp_path, 4, path=begin, width=2)
    assert f"rows of later steps, of an earlier start, are now in {tmp_path}" in caplog.text
    first = {f"{log}.behind-2": [2, 3, 4]}
    assert _logs(tmp_path) == {log: [0, 1, 2, 3], **first}
    assert (tmp_path / "lightning_logs/version_0/hparams.yaml.behind-2").read_text() == "width: 1\n"
    _fit(tmp_path, 3, path=begin)
    assert _logs(tmp_path) == {log: [0, 1, 2], **first, f"{log}.behind-2.2": [2, 3]}


def test_a_validation_that_saved_keeps_its_values(tmp_path: Path) -> None:
    """The save in the validation behind step 4 has not counted that step."""

    def fit(max_steps: int) -> None:
        save = ModelCheckpoint(tmp_path / "saved", monitor="val", save_last=True)
        trainer = pl.Trainer(
            strategy=MegatronStrategy(),
            accelerator="cpu",
            devices=1,
            max_steps=max_steps,
            val_check_interval=4,
            callbacks=[save],
            logger=CSVLogger(tmp_path, version=0),
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=4,
        )
        loader = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), batch_size=1)
        trainer.fit(_Validated(), loader, loader, ckpt_path="last")

    fit(4)
    assert _logs(tmp_path) == {"version_0/metrics.csv": [3, 3]}
    fit(8)
    assert _logs(tmp_path) == {"version_0/metrics.csv": [3, 3, 7, 7]}


def test_a_stale_requeue_checkpoint_leaves_logs_alone(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, TORCHELASTIC_MAX_RESTARTS="3"):
        _fit(tmp_path, 4, path=None).save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    assert (tmp_path / "starts.json").is_file()
    _fit(tmp_path, 2, "b", path=None)
    assert _logs(tmp_path) == {
        "version_0/metrics.csv": [*range(4)],
        "version_1/metrics.csv": [0, 1],
    }


def test_a_version_of_the_users_own_keeps_its_rows(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, 3, path=None, version=7)
    _fit(tmp_path, 2, path=None, version=7)
    log = "version_7/metrics.csv"
    expected = {log: [0, 1], f"{log}.behind-0": [0, 1, 2]}
    assert _logs(tmp_path) == expected
    again = pl.Trainer(
        strategy=MegatronStrategy(),
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(tmp_path, version=7),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.arange(2.0)[:, None]))
    again.predict(trainer.lightning_module, loader)
    assert _logs(tmp_path) == expected


def _opened(root: Path) -> tuple[CsvRows, Any]:
    logger = CSVLogger(root, name="", version="")
    rows = CsvRows(logger)
    rows.open()
    return rows, logger.experiment


def test_files_of_killed_starts_are_continued(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    # Killed in a row, and while the file was aside.
    (tmp_path / "metrics.csv.before").write_text("loss,step\n0.5,0\n0.25,1\n0.12")
    file.write_text("norm,step\n1.0,3\n")
    rows, experiment = _opened(tmp_path)
    experiment.log_metrics({"loss": 0.0}, step=2)
    assert rows.put_behind(2) == f"{file}.behind-2"
    assert file.read_text().split() == ["loss,norm,step", "0.5,,0", "0.25,,1", "0.12,,", "0.0,,2"]
    assert (tmp_path / "metrics.csv.behind-2").read_text().split() == ["loss,norm,step", ",1.0,3"]
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.csv.behind-2"]
    # Nothing lies behind: the file is left as it is, to the byte.
    before = file.read_bytes()
    rows, _ = _opened(tmp_path)
    assert rows.put_behind(3) is None and file.read_bytes() == before
    rows, experiment = _opened(tmp_path)
    rows.put_behind(0)
    experiment.log_metrics({"new": 1.0}, step=0)
    experiment.save()
    assert file.read_text().split() == ["new,step", "1.0,0"]
