"""Schedules and parameter groups under every kind of layout: the same rates, losses and groups as
on one device.

Gradient norms are compared over six steps with 1e-5 relative, as in test_layouts; rates are equal
to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import NO_DECAY, LRSchedule, ParamGroup
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, STOP, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 6, 3, 8, 8, 30
RTOL = 1e-5
GROUPS = (
    ParamGroup(
        name="embeddings",
        params=["**word_embeddings.weight", "**output_layer.weight"],
        lr=1e-3,
        min_lr=1e-4,
    ),
    NO_DECAY,
    ParamGroup(name="first", params=["**.layers.0.**"], lr_mult=0.5),  # on the first stage only
)
SCHEDULE = LRSchedule(
    lr_decay_style="WSD", lr_decay_steps=48, lr_warmup_steps=16, wsd_decay_steps=24,
    lr_wsd_decay_style="minus_sqrt",
    min_lr=1e-4, start_wd=0.0, end_wd=0.3, wd_incr_style="linear", unit="samples",
    samples_per_step=GLOBAL_BATCH,
)  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "dp2": (2, {"data_parallel": "zero1"}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2, "data_parallel": "zero1"}),
    "pp2-ddp2": (
        4,
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "data_parallel": "ddp"},
    ),
}


class _Rates(LearningRateMonitor):
    """Collects what the monitor would log."""

    def __init__(self) -> None:
        super().__init__(log_weight_decay=True)
        self.rates: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        # The monitor wants one; nothing is written.
        trainer.loggers.append(pl.loggers.CSVLogger("unused"))
        super().on_train_start(trainer, *args, **kwargs)
        trainer.loggers.pop()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.rates.append(dict(self._extract_stats(trainer, "any")))


def _fit(
    layout: str, folder: str, checkpoint: str | None = None
) -> tuple[list[dict[str, float]], list[float]]:
    _, options = LAYOUTS[layout]
    config = tiny_config(
        num_layers=4,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
    )
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    record, rates = Losses(), _Rates()
    fit = trainer(
        "auto" if layout == "plain" else MegatronStrategy(**options),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[
            record,
            rates,
            ModelCheckpoint(
                dirpath=folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1
            ),
        ],
        gradient_clip_val=1.0,
    )
    replicas = 2 if "dp2" in layout else 1
    module = GPTLightningModule(
        config, learning_rate=1e-2, weight_decay=0.0, lr_schedule=SCHEDULE, param_groups=GROUPS
    )
    fit.fit(module, DataLoader(rows, batch_size=GLOBAL_BATCH // replicas), ckpt_path=checkpoint)
    return rates.rates, record.norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pp2", "dp2"),
        ("pp2-dp2", "tp2-dp2"),
        ("tp2-dp2", "pp2-ddp2"),
    ],
)
def test_layouts_follow_one_schedule_and_one_table(first: str, second: str, tmp_path: Path) -> None:
    rates, norms = run_ranks(1, _fit, "plain", str(tmp_path / "plain"))[0]
    assert set(rates[0]) == {
        f"lr-AdamW/{name}{what}"
        for name in ("default", "embeddings", "no_decay", "first")
        for what in ("", "-weight_decay")
    }
    assert [step["lr-AdamW/default"] for step in rates][:3] == [0.0, 5e-3, 1e-2]
    for mine, own in run_ranks(LAYOUTS[first][0], _fit, first, str(tmp_path), timeout_s=100):
        assert mine == rates
        assert own == pytest.approx(norms, rel=RTOL)
    path = str(tmp_path / f"step={STOP}.ckpt")
    for mine, own in run_ranks(
        LAYOUTS[second][0], _fit, second, str(tmp_path / "second"), path, timeout_s=100
    ):
        assert mine == rates[STOP:]
        assert own == pytest.approx(norms[STOP:], rel=RTOL)
