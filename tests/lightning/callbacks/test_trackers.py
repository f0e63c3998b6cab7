"""W&B offline and MLflow: one run of all ranks, which a restart continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.toy import ToyModule
from tests.lightning.support import TP2_PP2, Layout, run

STEPS = 4  # of an epoch
TIMEOUT_S = 300.0  # trackers take long to import, on every rank


def _fit(layout: Layout, folder: str, logger: Any, max_epochs: int) -> list[float]:
    """Train an epoch more than the start before. Return the logged losses."""
    losses: list[float] = []
    keep = ModelCheckpoint(folder, save_last=True)
    trainer = layout.trainer(
        folder,
        callbacks=[keep],
        logger=logger,
        log_every_n_steps=1,
        max_epochs=max_epochs,
        enable_checkpointing=True,
    )
    module = ToyModule()
    logged = logger.log_metrics

    def log_metrics(metrics: Any, step: int | None = None) -> None:
        losses.extend(value for name, value in metrics.items() if name == "train_loss_step")
        logged(metrics, step)

    logger.log_metrics = log_metrics
    trainer.fit(module, datamodule=layout.data_module(), ckpt_path="last")
    return losses


def _to_wandb(layout: Layout, folder: str, max_epochs: int) -> list[float]:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    losses = _fit(layout, folder, WandbLogger(offline=True, save_dir=folder), max_epochs)
    wandb.teardown()
    return losses


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_wandb_has_one_offline_run_over_restarts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for max_epochs in (1, 2):
        first, *others = run(TP2_PP2, _to_wandb, tmp_path, max_epochs, timeout_s=TIMEOUT_S)
        assert len(first) == STEPS and all(losses == first for losses in others)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "a folder of each start, from rank 0 alone"
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1, "one id"
    assert all(list(folder.glob("run-*.wandb")) for folder in folders)


def _to_mlflow(
    layout: Layout, folder: str, max_epochs: int, name: str = "lightning_logs"
) -> list[float]:
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(name, tracking_uri=f"sqlite:///{folder}/runs.db")
    return _fit(layout, folder, logger, max_epochs)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_mlflow_has_one_run_over_restarts(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs.db")
    client.search_experiments()  # makes the database, once before the ranks
    losses = [
        run(TP2_PP2, _to_mlflow, tmp_path, max_epochs, timeout_s=TIMEOUT_S)[0]
        for max_epochs in (1, 2)
    ]
    [experiment] = [e for e in client.search_experiments() if e.name == "lightning_logs"]
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["num_layers"] == "4"
    history = client.get_metric_history(found.info.run_id, "train_loss_step")
    values = {metric.step: metric.value for metric in history}
    assert [values[step] for step in range(2 * STEPS)] == [loss for part in losses for loss in part]
    run(TP2_PP2, _to_mlflow, tmp_path, 3, "renamed", timeout_s=TIMEOUT_S)
    [renamed] = [e for e in client.search_experiments() if e.name == "renamed"]
    [other] = client.search_runs([renamed.experiment_id])
    history = client.get_metric_history(other.info.run_id, "train_loss_step")
    assert [metric.step for metric in history] == list(range(2 * STEPS, 3 * STEPS))
    assert len(client.search_runs([experiment.experiment_id])) == 1
