"""Batches that grow: the same steps under every layout as on one device, across passes over the
data and after a resume.

1e-5 relative for gradient norms, as in test_layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler

from megatron_lightning.data import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

SAMPLES, SEQUENCE, VOCABULARY = 40, 8, 30
SCHEDULE = BatchSizeSchedule(global_batch_size=16, rampup_batch_size=(4, 4, 48))
# 32 of the 40 samples in the first pass, whose rest is no whole batch; 40 in the second.
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 16]
CONSUMED = [sum(SIZES[: step + 1]) for step in range(len(SIZES))]
RTOL = 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2, "data_parallel": "zero1"}),
    "fsdp4": (4, {"data_parallel": "fsdp", "micro_batch_size": 1}),
    "ddp2": (2, {"data_parallel": "ddp", "micro_batch_size": 2}),
}


class _Consumed(pl.Callback):
    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.samples.append(getattr(trainer.strategy, "consumed_samples", 0))


class _Data(pl.LightningDataModule):
    batch_size_schedule = SCHEDULE

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        text = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
        rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
        return DataLoader(rows, batch_sampler=ScheduledBatchSampler(RandomSampler(rows), SCHEDULE))


def _fit(
    layout: str, folder: str, checkpoint: str | None = None
) -> tuple[list[float], list[int], int]:
    pl.seed_everything(5)
    config = tiny_config(
        hidden_size=16, num_attention_heads=2, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE
    )
    consumed = _Consumed()
    keep = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = fit(
        None if layout == "plain" else LAYOUTS[layout][1],
        GPTLightningModule(config, learning_rate=1e-2),
        _Data(),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[consumed, keep],
        ckpt_path=checkpoint,
    )
    return run.norms, consumed.samples, run.trainer.current_epoch


def _launch(layout: str, folder: Path, checkpoint: Path | None = None) -> list[Any]:
    path = None if checkpoint is None else str(checkpoint)
    return run_ranks(LAYOUTS[layout][0], _fit, layout, str(folder), path, timeout_s=100)


@pytest.mark.slow
def test_batches_grow_alike_under_every_layout(tmp_path: Path) -> None:
    assert [SCHEDULE.batch_size(sum(SIZES[:step])) for step in range(len(SIZES))] == SIZES
    norms, _, epochs = _launch("plain", tmp_path / "plain")[0]
    assert len(norms) == len(SIZES)
    saved = tmp_path / "pp2-dp2"
    for found, consumed, passes in _launch("pp2-dp2", saved):
        assert consumed == CONSUMED
        assert found == pytest.approx(norms, rel=RTOL)
        assert passes == epochs == 2
    # in the first pass, at its end, and in the second pass
    for layout, step in (("tp2-dp2", 3), ("ddp2", 6), ("fsdp4", 7)):
        for found, consumed, _ in _launch(layout, tmp_path / layout, saved / f"step={step}.ckpt"):
            assert consumed == CONSUMED[step:], layout
            assert found == pytest.approx(norms[step:], rel=RTOL), layout


def test_sizes_that_the_ranks_cannot_share_are_refused_before_anything_starts() -> None:
    fit = trainer(MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=3), devices=2)
    config = tiny_config(hidden_size=16, num_attention_heads=2, vocab_size=VOCABULARY)
    with pytest.raises(
        ConfigError,
        match=r"global batch size \(4\) is not divisible by micro batch size \(3\) times data",
    ):
        fit.fit(GPTLightningModule(config), datamodule=_Data())
