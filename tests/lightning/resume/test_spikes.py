"""Spikes of the loss: warned of, skipped, or stopped at, with other data at the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from megatron_lightning.callbacks import SpikeGuard
from megatron_lightning.errors import ConfigError, SpikeError
from tests.helpers.toy import ToyData, ToyModule
from tests.lightning.support import DP2, GLOBAL_BATCH, ONE, PP2, TP2_PP2, Layout, layouts, run

SPIKE = 5  # batch
STEPS = 8


class _Spikes(ToyModule):
    """The loss of one batch is far above the others."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        first = samples_of(batch)[0]
        if SPIKE * GLOBAL_BATCH <= first < (SPIKE + 1) * GLOBAL_BATCH:
            output["loss"] = output["loss"] * 50
        return output


def samples_of(batch: dict[str, Tensor]) -> list[int]:
    return batch["number"].flatten().tolist()


class _Numbered(ToyData):
    """Samples that know their place."""

    skip_samples: list[list[int]] | None = None

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        for number, sample in enumerate(loader.dataset):
            sample["number"] = torch.tensor([number])
        return loader


class _Record(pl.Callback):
    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.samples.append(samples_of(batch))


def _fit(
    layout: Layout,
    folder: str,
    *callbacks: pl.Callback,
    skip_samples: list[list[int]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    record, module = _Record(), _Spikes()
    trainer = layout.trainer(folder, callbacks=[record, *callbacks], **{"max_epochs": 1, **options})
    data = _Numbered(batch_size=GLOBAL_BATCH // layout.data, num_samples=STEPS * GLOBAL_BATCH)
    data.skip_samples = skip_samples
    error = ""
    path = "last" if trainer.checkpoint_callbacks else None
    try:
        trainer.fit(module, datamodule=data, ckpt_path=path)
    except SpikeError as found:
        error = str(found)
    return {
        "samples": record.samples,
        "weights": [p.detach().clone() for p in module.parameters()],
        "consumed": trainer.strategy.consumed_samples,
        "steps": trainer.global_step,
        "error": error,
        "spikes": float(trainer.callback_metrics.get("spikes", 0)),
        "skipped": trainer.strategy.skipped_steps,
    }


def _guard(action: Any, **options: Any) -> SpikeGuard:
    return SpikeGuard(window=4, min_steps=3, sigma=6.0, action=action, **options)


def _skips(layout: Layout, folder: str) -> list[dict[str, Any]]:
    spike = [[SPIKE * GLOBAL_BATCH, (SPIKE + 1) * GLOBAL_BATCH]]
    return [
        _fit(layout, folder, _guard("skip")),
        _fit(layout, folder, skip_samples=spike),
        _fit(layout, folder, _guard("warn")),
    ]


@pytest.mark.slow
@layouts(ONE, PP2, DP2, TP2_PP2)
def test_a_skipped_step_leaves_no_trace(layout: Layout, tmp_path: Path) -> None:
    first, *others = run(layout, _skips, tmp_path)
    skipped, passed_over, warned = first
    assert (skipped["spikes"], skipped["skipped"], warned["spikes"]) == (1, 1, 1)
    assert (passed_over["steps"], warned["skipped"]) == (STEPS - 1, 0)
    assert all(map(torch.equal, skipped["weights"], passed_over["weights"]))
    assert not all(map(torch.equal, skipped["weights"], warned["weights"]))
    assert {run["consumed"] for run in first} == {STEPS * GLOBAL_BATCH}
    for rank in others:  # every rank decides alike
        assert [run["spikes"] for run in rank] == [run["spikes"] for run in first]


def _start(layout: Layout, folder: str) -> dict[str, Any]:
    keep = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    guard = _guard("stop", skip_steps=2)
    return _fit(layout, folder, keep, guard, enable_checkpointing=True)


def _start_another(layout: Layout, folder: str) -> list[int]:
    """Train and resume another run in the same folder. Return the resumed run's samples."""
    for steps in (4, STEPS):
        keep = ModelCheckpoint(f"{folder}/another", save_last=True, every_n_train_steps=2)
        options = {"enable_checkpointing": True, "max_steps": steps}
        result = _fit(layout, folder, keep, _guard("warn"), **options)
    return [number for batch in result["samples"] for number in batch]


@layouts(ONE, slow=[PP2, DP2])
def test_the_start_after_a_stop_passes_over_the_spike(layout: Layout, tmp_path: Path) -> None:
    stopped, *_ = run(layout, _start, tmp_path)
    assert "loss" in stopped["error"] and "passes over the samples 32 to 48" in stopped["error"]
    record = json.loads((tmp_path / "spikes.json").read_text())
    assert list(record.values()) == [{"skip_samples": [[32, 48]]}]
    # The record is of this run alone.
    read = {number for samples in run(layout, _start_another, tmp_path) for number in samples}
    assert read == set(range(4 * GLOBAL_BATCH, STEPS * GLOBAL_BATCH))
    resumed = run(layout, _start, tmp_path)
    read = {number for rank in resumed for batch in rank["samples"] for number in batch}
    # From the checkpoint of step 4 on, without steps 4 and 5.
    assert read == set(range(48, 64)) and resumed[0]["error"] == ""
    assert resumed[0]["consumed"] == 64 and resumed[0]["steps"] == 6


def test_a_stop_without_counted_samples_promises_none(tmp_path: Path) -> None:
    guard = SpikeGuard(action="stop")
    alone = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False)
    with pytest.raises(SpikeError, match=r"A SingleDeviceStrategy counts no samples.*skip_samples"):
        guard.allows_update(alone, float("nan"), 1.0)
    assert not (tmp_path / "spikes.json").exists()


def test_a_level_that_has_changed_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"min_steps is 1 and window is 128\."):
        SpikeGuard(min_steps=1)
    with pytest.raises(ConfigError, match=r"sigma is 0; it must be positive"):
        SpikeGuard(sigma=0)
    with pytest.raises(ConfigError, match=r"action is 'halt'; it must be one of"):
        SpikeGuard(action="halt")  # type: ignore[arg-type]
    guard = SpikeGuard(window=2, min_steps=2, action="skip", max_skips=1)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    verdicts = [guard.allows_update(trainer, loss, 1.0) for loss in (1.0, 1.1, 50.0)]
    assert verdicts == [True, True, False]
    with pytest.raises(SpikeError, match="2 steps in a row were skipped: the level has changed"):
        guard.allows_update(trainer, float("nan"), 1.0)
