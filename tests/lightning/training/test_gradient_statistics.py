"""GradientNormMonitor: norms of the whole model, its parameter groups and its layers, zeros and
skipped steps, on every layout.

ThroughputMonitor, which looks on: samples count once on every layout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megatron_lightning.callbacks import GradientNormMonitor, ThroughputMonitor
from megatron_lightning.config import LossScaleOptions
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.strategies import MegatronMixedPrecision, MegatronStrategy
from tests.helpers.layouts import LAYOUTS, fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import (
    DDP2,
    DP2,
    GLOBAL_BATCH,
    MICRO,
    PP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    run,
    single,
)

STEPS = 3


class _Groups(ToyModule):
    """Two groups, of which a pipeline stage has one alone: the head's are named. Tokens from 10 on
    do not occur."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return super().training_step({**batch, "ids": batch["ids"] % 10}, batch_idx)

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        head = [] if self.model.head is None else list(self.model.head.parameters())
        rest = [p for p in self.model.parameters() if not any(p is other for other in head)]
        groups = [{"params": rest}, *([{"params": head, "name": "head"}] if head else [])]
        return torch.optim.AdamW(groups, lr=1e-3)


class _Record(pl.Callback):
    """Values logged for each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = trainer.callback_metrics.items()
        self.seen.append(
            {key: float(value) for key, value in logged if "norm" in key or "skipped" in key}
        )


def _statistics(layout: Layout, folder: str, more: dict[str, Any]) -> list[dict[str, float]]:
    record, monitor = _Record(), GradientNormMonitor(groups=True, zeros=True)
    strategy = layout.strategy(**more)
    callbacks = [monitor, ThroughputMonitor(), record]
    options = {
        "max_steps": STEPS,
        "callbacks": callbacks,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "gradient_clip_val": 0.1,
    }
    fitted = trainer(strategy, default_root_dir=folder, **options)
    fitted.fit(_Groups(), datamodule=layout.data_module())
    speed = {
        key: float(value)
        for key, value in fitted.callback_metrics.items()
        if key.startswith("throughput/")
    }
    batch = speed["throughput/samples_per_second"] * speed["throughput/step_time"]
    assert batch == pytest.approx(GLOBAL_BATCH), speed  # of all ranks, each sample once
    if strategy.context.world_size > 1:  # else the Trainer's plugin clips
        assert float(strategy.last_grad_norm) == pytest.approx(record.seen[-1]["grad_norm"])
    return record.seen


@pytest.mark.spread(1)
@layouts(PP2, DDP2, slow=[MICRO, PP2_DP2, DP2])
@pytest.mark.parametrize("more", [{}, {"data_parallel": "fsdp"}], ids=["", "fsdp"])
def test_norms_of_groups_and_zeros(layout: Layout, more: dict[str, Any], tmp_path: Path) -> None:
    expected = single(_statistics_of_one_device)
    assert expected[0].keys() == {"grad_norm", "grad_norm/0", "grad_norm/head", "grad_norm_zeros"}
    for step in expected:
        assert step["grad_norm"] ** 2 == pytest.approx(
            step["grad_norm/0"] ** 2 + step["grad_norm/head"] ** 2
        )
        assert step["grad_norm_zeros"] >= 7 * 16
    for rank in run(layout, _statistics, tmp_path, more):
        for actual, step in zip(rank, expected, strict=True):
            # The gradient of the 4 x 16 key biases is zero but for rounding.
            assert 7 * 16 <= actual.pop("grad_norm_zeros") <= 7 * 16 + 4 * 16
            assert_close(
                actual, {key: value for key, value in step.items() if key != "grad_norm_zeros"}
            )


def _statistics_of_one_device(layout: Layout, folder: str) -> list[dict[str, float]]:
    return _statistics(layout, folder, {}) if layout.options is not None else _plain(folder)


def _plain(folder: str) -> list[dict[str, float]]:
    record, monitor = _Record(), GradientNormMonitor(groups=True, zeros=True)
    options = {
        "max_steps": STEPS,
        "callbacks": [monitor, record],
        "limit_val_batches": 0,
        "gradient_clip_val": 0.1,
    }
    data = Layout("single", 1, 1, None).data_module()
    trainer("auto", default_root_dir=folder, **options).fit(_Groups(), datamodule=data)
    return record.seen


class _Overflows(_Groups):
    """The second step overflows."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * (float("inf") if batch_idx == 1 else 1.0)
        return output


def _skips(layout: Layout, folder: str) -> list[float]:
    record = _Record()
    plugin = MegatronMixedPrecision("16-mixed", "cpu", LossScaleOptions(initial_scale=64.0))
    fit = layout.trainer(
        folder,
        max_steps=STEPS,
        callbacks=[GradientNormMonitor(), record],
        limit_val_batches=0,
        plugins=[plugin],
    )
    fit.fit(_Overflows(), datamodule=layout.data_module())
    return [step["skipped_steps"] for step in record.seen]


@pytest.mark.slow
@layouts(PP2)
def test_skipped_steps_are_logged(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _skips, tmp_path):
        assert rank == [0.0, 1.0, 1.0]


def _vectors(name: str) -> str | None:
    return "vectors" if "norm" in name else None


class _NormsByKey(pl.Callback):
    """Norms of the gradients by parameter, and the largest gradient of all weights of norms."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, float]]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        if isinstance(trainer.strategy, MegatronStrategy):
            norms = trainer.strategy.gradient_norms(str)
            largest = trainer.strategy.gradient_norms(_vectors, norm_type=math.inf)
            assert trainer.strategy.gradient_norms(lambda _: None) == {}
        else:
            gradients = {name: p.grad for name, p in module.named_parameters()}
            norms = {name: g.norm() for name, g in gradients.items() if g is not None}
            vectors = [g for name, g in gradients.items() if g is not None and _vectors(name)]
            largest = {"vectors": max(g.abs().max() for g in vectors)}
        self.seen.append(
            {
                kind: {key: float(value) for key, value in values.items()}
                for kind, values in (("norms", norms), ("largest", largest))
            }
        )


def _norms_by_key(layout: str) -> tuple[list[dict[str, dict[str, float]]], dict[str, float]]:
    """Train a model with tied embeddings, norms of heads, and experts in every second layer."""
    moe = MoEConfig(num_experts=4, layer_freq=(0, 1, 0, 1))
    config = tiny_config(
        num_layers=4, moe=moe, share_embeddings_and_output_weights=True, qk_layernorm=True
    )
    record = _NormsByKey()
    run = fit(layout, config, callbacks=[GradientNormMonitor(layers=True), record])
    return record.seen, {key: value for key, value in run.logged.items() if "norm" in key}


@pytest.mark.parametrize(
    "layout",
    [
        "ep2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2-pp2", "tp2", "pp2")),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("pp2-vpp2", "ddp2", "dp2-zero1", "fsdp2")
        ),
    ],
)
def test_norms_by_key(layout: str) -> None:
    """Each parameter counts once: sharded, tied over stages, replicated or an expert's."""
    expected, logged = single(_norms_of_one_device)
    assert {"grad_norm/model.decoder.layers.0", "grad_norm/model.decoder.layers.1"} < logged.keys()
    total = sum(value**2 for key, value in logged.items() if key.startswith("grad_norm/")) ** 0.5
    assert logged["grad_norm"] == pytest.approx(total)
    for seen, own in run_ranks(LAYOUTS[layout].ranks, _norms_by_key, layout):
        assert_close(seen, expected)
        assert_close(own, logged)


def _norms_of_one_device(*_: Any) -> Any:
    return _norms_by_key("single")
