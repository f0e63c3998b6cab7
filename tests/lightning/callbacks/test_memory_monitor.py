"""MemoryMonitor: the fullest rank and the prediction for it, equal on every rank; the values of a
GPU's allocator are tried with numbers of our own."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import MemoryMonitor
from megatron_lightning.callbacks.memory import memory_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ParallelLayout
from megatron_lightning.planning import memory
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import SEQUENCE, VOCABULARY, small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

CPU_KEYS = {"resident_gib", "peak_resident_gib", "peak_rank", "predicted_gib"}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def _fit(options: dict[str, Any]) -> tuple[dict[str, float], float]:
    text = torch.randint(0, VOCABULARY, (16, SEQUENCE + 1))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    monitor = MemoryMonitor(every_n_steps=2, each_rank=True)
    strategy = MegatronStrategy(**options, micro_batch_size=2)
    fit = trainer(strategy, max_steps=2, callbacks=[monitor])
    fit.fit(GPTLightningModule(small_gpt(4)), DataLoader(rows, batch_size=8))
    logged = fit.callback_metrics.items()
    values = {k.removeprefix("memory/"): float(v) for k, v in logged if k.startswith("memory/")}
    return values, memory_of(torch.device("cpu"))["peak_resident"] / 2**30


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(4, TP2_PP2, id="tp2-pp2", marks=pytest.mark.slow),
        pytest.param(
            2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}, id="zb-h1",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_fullest_rank_and_its_prediction(ranks: int, options: dict[str, Any]) -> None:
    results = run_ranks(ranks, _fit, options)
    values = results[0][0]
    assert all(other == values for other, _ in results)
    single = {key for key in values if "/" not in key}
    assert single == CPU_KEYS and len(values) == len(CPU_KEYS) + 3 * ranks
    peaks = [values[f"peak_resident_gib/rank_{rank}"] for rank in range(ranks)]
    assert values["peak_resident_gib"] == max(peaks) == peaks[int(values["peak_rank"])]
    for rank, (_, peak_at_end) in enumerate(results):
        resident = values[f"resident_gib/rank_{rank}"]
        # The kernel counts pages in batches.
        assert 0.05 < resident <= peaks[rank] <= peak_at_end * 1.01
    sizes = {name: size for name, size in options.items() if name.endswith("_size")}
    planned = memory(
        small_gpt(4), ParallelLayout(**sizes), world_size=ranks, sequence_length=SEQUENCE,
        micro_batch_size=2, num_microbatches=4, precision="32-true", device="cpu",
        pipeline_schedule=options.get("pipeline_schedule", "auto"),
    )  # fmt: skip
    for rank in range(ranks):
        row = planned.ranks[rank * len(planned.ranks) // ranks]
        assert values[f"predicted_gib/rank_{rank}"] == row.total_bytes / 2**30
    assert values["predicted_gib"] == values[f"predicted_gib/rank_{int(values['peak_rank'])}"]


def test_a_model_without_formulas_has_no_prediction() -> None:
    monitor = MemoryMonitor()
    fit = trainer("auto", max_steps=2, log_every_n_steps=1, callbacks=[monitor])
    fit.fit(ToyModule(), ToyData())
    logged = {key for key in fit.callback_metrics if key.startswith("memory/")}
    assert logged == {f"memory/{key}" for key in CPU_KEYS - {"predicted_gib"}}
    wrong: Any
    for wrong in (0, 1.5):
        with pytest.raises(ConfigError, match=f"every_n_steps is {wrong}"):
            MemoryMonitor(every_n_steps=wrong)


def test_resident_memory_follows_pages() -> None:
    size = 64 * 2**20
    before = memory_of(torch.device("cpu"))
    with mmap.mmap(-1, size) as pages:
        pages.write(b"x" * size)
        during = memory_of(torch.device("cpu"))
    after = memory_of(torch.device("cpu"))
    assert during["resident"] - before["resident"] >= size // 2
    assert during["resident"] - after["resident"] >= size // 2  # pages are returned
    assert after["peak_resident"] >= during["resident"] * 0.99


def test_a_gpu_has_the_allocators_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("memory_allocated", 1),
        ("memory_reserved", 3),
        ("max_memory_allocated", 2),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory_of(torch.device("cuda", 0)) == {"allocated": 1, "reserved": 3, "peak": 2}
