"""Short trainings of hybrid models with one global batch on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH = 2, 4
Layout = tuple[int, int, dict[str, Any]]
"""Ranks, data-parallel ranks, and options of the strategy."""
LAYOUTS: dict[str, Layout] = {
    "tp2, sp": (2, 1, {"tensor_model_parallel_size": 2}),
    "pp2": (2, 1, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "cp2": (2, 1, {"context_parallel_size": 2}),
    "ep2": (2, 2, {"expert_model_parallel_size": 2}),
    "fsdp2": (2, 2, {"data_parallel": "fsdp"}),
    "zero1": (2, 2, {}),
    "tp2 x pp2": (
        4, 1,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    ),
    "tp2 x cp2": (4, 1, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "pp2 x vpp2": (
        2, 1,
        {
            "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
        },
    ),
}  # fmt: skip


def train(
    config: TransformerConfig, data: int, options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of ``STEPS`` steps on ``data`` data-parallel ranks."""
    length, generator = config.max_sequence_length, torch.Generator().manual_seed(3)
    text = torch.randint(0, config.vocab_size, (STEPS * BATCH, length + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    record = Losses()
    fit = trainer(
        MegatronStrategy(**options), max_steps=STEPS, callbacks=[record], gradient_clip_val=1.0
    )
    fit.fit(GPTLightningModule(config), DataLoader(rows, batch_size=BATCH // data))
    return record.losses, record.norms


def assert_equals_one_process(layout: Layout, config: TransformerConfig) -> None:
    """Compare a layout's losses and gradient norms with one process."""
    ((expected, norms),) = run_ranks(1, train, config, 1, {})
    size, data, options = layout
    results = run_ranks(size, train, config, data, options)
    losses = [sum(step) / size for step in zip(*(own for own, _ in results), strict=True)]
    # fp32, sums in another order.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
