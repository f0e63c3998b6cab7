"""SpeedMonitor: what counts as training time, and whose samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lightning.callbacks import SpeedMonitor
from megatron_lightning.errors import ConfigError

BATCH = {"tokens": torch.zeros(4, 16, dtype=torch.long)}


class _Run:
    """Drives the hooks as two ranks of a plain strategy would, with a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, monitor: SpeedMonitor, **module: Any
    ) -> None:
        self.now, self.logged, self.monitor = 0.0, dict[str, float](), monitor
        monkeypatch.setattr(
            "megatron_lightning.callbacks.speed.time",
            SimpleNamespace(perf_counter=lambda: self.now),
        )
        self.trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(), world_size=2, datamodule=None
        )
        self.module: Any = SimpleNamespace(
            log=lambda key, value, **_: self.logged.update({key: value}), **module
        )
        monitor.on_train_start(self.trainer, self.module)

    def batch(self, seconds: float) -> None:
        self.monitor.on_train_batch_start(self.trainer, self.module, BATCH, 0)
        self.now += seconds
        self.monitor.on_train_batch_end(self.trainer, self.module, None, BATCH, 0)


def test_the_first_batch_validation_and_saving_take_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _Run(monkeypatch, SpeedMonitor(), sequence_dims={"tokens": 1})
    run.batch(30.0)
    assert not run.logged
    run.batch(2.0)
    run.monitor.on_validation_start(run.trainer, run.module)
    run.now += 100.0
    run.batch(2.0)
    run.now += 1.0  # waiting for data counts
    run.batch(1.0)
    run.monitor.on_save_checkpoint(run.trainer, run.module, {})
    run.now += 50.0
    run.batch(2.0)
    assert run.logged == {
        "throughput/seconds_per_batch": 2.0,
        "throughput/samples_per_second": 4.0,
        "throughput/tokens_per_second": 64.0,
    }


def test_a_window_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, SpeedMonitor(window=2))
    for seconds in (9.0, 9.0, 9.0, 1.0, 1.0):
        run.batch(seconds)
    assert run.logged == {"throughput/seconds_per_batch": 1.0, "throughput/samples_per_second": 8.0}
    with pytest.raises(ConfigError, match="window is 0"):
        SpeedMonitor(window=0)
