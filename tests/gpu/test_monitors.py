"""ThroughputMonitor and MemoryMonitor on a GPU: times of events, no waiting between logging steps,
the allocator's peak beside the prediction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import MemoryMonitor, ThroughputMonitor
from megatron_lightning.callbacks.clock import Clock
from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.planning.search.peaks import peak_flops
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.trainers import trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTH = 1024


def _fit(steps: int, every: int) -> tuple[dict[str, float], list[Any]]:
    config = TransformerConfig(
        num_layers=4, hidden_size=1024, num_attention_heads=16, vocab_size=4096,
        max_sequence_length=LENGTH,
    )  # fmt: skip
    text = torch.randint(0, 4096, (8 * steps, LENGTH + 1))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    monitors: list[Any] = [ThroughputMonitor(), MemoryMonitor()]
    fit = trainer(
        MegatronStrategy(micro_batch_size=2), accelerator="gpu", devices=1, max_steps=steps,
        precision="bf16-true", log_every_n_steps=every, callbacks=monitors,
    )  # fmt: skip
    fit.fit(GPTLightningModule(config), DataLoader(rows, batch_size=8))
    return {name: float(value) for name, value in fit.callback_metrics.items()}, monitors


def test_mfu_and_memory() -> None:
    torch.cuda.reset_peak_memory_stats()
    values, monitors = _fit(12, 6)
    assert 0.02 < values["throughput/mfu"] < 1
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    if peak is not None:
        speed = values["throughput/tflops_per_device"] * 1e12
        assert values["throughput/mfu"] == pytest.approx(speed / peak)
    assert values["memory/allocated_gib"] <= values["memory/peak_gib"]
    assert values["memory/peak_gib"] <= values["memory/reserved_gib"] * 1.01
    # A step of the optimizer allocates for a moment, which the prediction leaves out.
    assert values["memory/predicted_gib"] == pytest.approx(values["memory/peak_gib"], rel=0.3)
    assert all(monitor.overhead < 0.01 for monitor in monitors)


def test_hooks_do_not_wait_between_logging_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "megatron_lightning.callbacks.throughput"
    monkeypatch.setattr(f"{place}.is_accumulating", lambda trainer: False)
    monkeypatch.setattr(f"{place}.is_logging_step", lambda trainer: False)
    device = torch.device("cuda", 0)
    fake: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device), world_size=1, datamodule=None,
        global_step=0, estimated_stepping_batches=10,
    )  # fmt: skip
    module: Any = SimpleNamespace(modules=lambda: [])
    monitor, batch = ThroughputMonitor(), {"tokens": torch.zeros(4, 8, device=device)}
    monitor.on_train_start(fake, module)
    x = torch.ones(2048, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            monitor.on_train_batch_start(fake, module, batch, step)
            x = x.mm(x).sigmoid()
            monitor.on_train_batch_end(fake, module, None, batch, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_clock_is_the_devices() -> None:
    clock = Clock(torch.device("cuda", 0))
    begin = clock.mark()
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s, for which the host does not wait
    end = clock.mark()
    clock.wait(end)
    assert 0.02 < clock.seconds(begin, end) < 2
