"""Predictions of models whose layers report losses, from batches without labels: equal to plain
Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import SEQUENCE, VOCABULARY, small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

EXPERTS = MoEConfig(num_experts=4, ffn_hidden_size=16, aux_loss_coeff=0.1)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "native": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "micro": (1, {"micro_batch_size": 1}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}


def _predict(options: dict[str, Any] | None) -> list[Any]:
    text = torch.randint(0, VOCABULARY, (4, SEQUENCE), generator=torch.Generator().manual_seed(3))
    rows: Any = [{"tokens": row} for row in text]
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    predicted: Any = trainer(strategy).predict(
        GPTLightningModule(small_gpt(2, moe=EXPERTS, mtp_num_layers=1)),
        DataLoader(rows, batch_size=2),
    )
    return [batch.tolist() for batch in predicted]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "layout",
    ["native", "ep2", "pp2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("micro", "tp2", "cp2")],
)
def test_batches_without_labels(layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    expected = _predict(None)
    found = run_ranks(ranks, _predict, options)
    if layout == "ep2":  # two data-parallel ranks, of which each takes every second row
        rows = [row for batch in expected for row in batch]
        own = [[row for batch in of_rank for row in batch] for of_rank in found]
        assert own == [rows[0::2], rows[1::2]]
    else:
        assert found == [expected] * ranks
