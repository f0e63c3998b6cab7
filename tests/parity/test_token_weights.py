"""GPTLightningModule with weights of tokens: the loss is their weighted mean on every layout.

Tolerances: fp32 sums over ranks and micro-batches are taken in another order (1e-5 relative).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.language_model import SEQUENCE, VOCABULARY, small_gpt
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

STEPS, BATCH = 3, 4
MICRO: dict[str, Any] = {"micro_batch_size": 1}
# name: strategy of the layout, strategy of the one process, data-parallel ranks
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int]] = {
    "micro": (MICRO, None, 1),
    "cp2": ({"context_parallel_size": 2, "micro_batch_size": 2}, None, 1),
    "pp2": ({"pipeline_model_parallel_size": 2, **MICRO}, None, 1),
    "dp2": ({}, None, 2),
    # Reported losses are means over a micro-batch: the one process has the same micro-batches.
    "pp2-reports": ({"pipeline_model_parallel_size": 2, **MICRO}, MICRO, 1),
    "cp2-reports": ({"context_parallel_size": 2, **MICRO}, MICRO, 1),
}
EXPERTS = MoEConfig(
    num_experts=4, ffn_hidden_size=16, aux_loss_coeff=0.1, router_load_balancing_type="seq_aux_loss"
)


def _rows(scale: float) -> list[dict[str, Tensor]]:
    """Weights of 0 to ``scale``, beside labels of -100 whose weights are large."""
    drawn = torch.Generator().manual_seed(3)
    count = STEPS * BATCH
    text = torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=drawn)
    weights = torch.rand(count, SEQUENCE, generator=drawn)
    rows = [
        {"tokens": t[:-1], "labels": t[1:].clone(), "loss_mask": scale * w}
        for t, w in zip(text, weights, strict=True)
    ]
    for index, row in enumerate(rows):  # other numbers in every row and half of it
        row["labels"][: 1 + index % 3] = -100
        row["loss_mask"][: 1 + index % 3] = 7
        row["loss_mask"][-2] = 0
    return rows


def _train(
    options: dict[str, Any] | None,
    config: dict[str, Any],
    num_replicas: int = 1,
    scale: float = 1e-3,
) -> dict[str, Any]:
    loader: Any = DataLoader(_rows(scale), batch_size=BATCH // num_replicas)  # type: ignore[arg-type]
    module = GPTLightningModule(small_gpt(2, **config), learning_rate=1e-2)
    run = fit(options, module, loader, loader, steps=STEPS, log_every_n_steps=1)
    logged = run.logged
    if num_replicas > 1:  # Lightning averages the logged training loss over replicas
        logged.pop("train_loss")
    return {"losses": run.losses, "norms": run.norms, "logged": logged}


@cache
def _one_process(options: tuple[tuple[str, Any], ...] | None, config: str) -> dict[str, Any]:
    given = None if options is None else dict(options)
    return run_ranks(1, _train, given, _CONFIGS[config])[0]


_CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "reports": {"moe": EXPERTS, "mtp_num_layers": 1},
}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "layout",
    ["cp2", "dp2", "pp2-reports"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("micro", "pp2", "cp2-reports")],
)
def test_weights_below_one_beside_ignored_labels(layout: str) -> None:
    options, one, num_replicas = LAYOUTS[layout]
    config = "reports" if layout.endswith("-reports") else "dense"
    expected = _one_process(None if one is None else tuple(one.items()), config)
    ranks = 1 if layout == "micro" else 2
    found = run_ranks(ranks, _train, options, _CONFIGS[config], num_replicas)
    for rank in found:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        expected_logs = {k: v for k, v in expected["logged"].items() if k in rank["logged"]}
        assert rank["logged"] == pytest.approx(expected_logs, rel=1e-5)
        assert np.isfinite(list(rank["logged"].values())).all()
    if num_replicas == 1:
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_only_the_ratios_of_weights_matter() -> None:
    small = run_ranks(1, _train, None, {}, 1, 1e-3)[0]
    # The large weights are beside ignored labels: they change nothing.
    large = run_ranks(1, _train, None, {}, 1, 1e3)[0]
    assert large["losses"] == pytest.approx(small["losses"], rel=1e-5)
    assert large["logged"] == pytest.approx(small["logged"], rel=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_a_mask_may_be_of_numbers_or_truths(kind: torch.dtype) -> None:
    module = GPTLightningModule(small_gpt(2))
    batch = {
        "labels": torch.tensor([[-100, 1, 2, 3]]),
        "loss_mask": torch.tensor([[1, 1, 0, 1]]).to(kind),
    }
    assert module.num_items(batch) == 2
    assert module.num_items({"labels": batch["labels"]}) == 3
    assert module.num_items({**batch, "loss_mask": torch.full((1, 4), 0.25)}) == 0.75
