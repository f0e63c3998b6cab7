"""Padding is no text to layers of experts: padded rows train as rows without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.modules import DPOModule, GPTLightningModule
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, fit, tiny_config
from tests.helpers.ranks import run_ranks

STEPS, BATCH, TEXT, LENGTH = 3, 4, 9, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2, ETP: 1},
    "cp2-ep2": {CP: 2, EP: 2},
    "pp2": {PP: 2, MICRO: BATCH},
}
BALANCED = {
    "router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "aux_loss_coeff": [0.5, 0.5],
    "z_loss_coeff": 0.01, "router_score_function": "sigmoid", "router_enable_expert_bias": True,
    "router_bias_update_rate": 0.05,
}  # fmt: skip


def _config(**moe: Any) -> TransformerConfig:
    return tiny_config(moe=MoEConfig(num_experts=4, router_topk=2, **moe), max_sequence_length=64)


def _row(text: torch.Tensor, length: int | None) -> dict[str, torch.Tensor]:
    """Return a row, padded to ``length``. None: without padding."""
    row = {"tokens": text[:-1], "labels": text[1:]}
    if length is None:
        return row
    missing = length - TEXT
    padding = torch.arange(length) >= TEXT
    return {
        "tokens": F.pad(row["tokens"], (0, missing), value=5),
        "labels": F.pad(row["labels"], (0, missing), value=-100),
        "padding": padding,
    }


def _texts(count: int) -> torch.Tensor:
    return torch.randint(0, 60, (count, TEXT + 1), generator=torch.Generator().manual_seed(4))


def _train(options: dict[str, Any] | None, length: int | None) -> Any:
    rows: Any = [_row(text, length) for text in _texts(STEPS * BATCH)]
    module = GPTLightningModule(_config(**BALANCED), learning_rate=1e-3)
    run = fit(options, module, DataLoader(rows, batch_size=BATCH), steps=STEPS)
    biases = [b.tolist() for name, b in module.named_buffers() if name.endswith("expert_bias")]
    return run.losses, run.norms, biases, run.logged


def _train_all() -> list[Any]:
    return [_train(options, LENGTH) for options in LAYOUTS.values()]


@pytest.mark.slow
def test_padded_rows_train_as_rows_without_padding() -> None:
    """Losses, norms, logged losses of routers; fp32, sums in another order: 1e-5."""
    losses, norms, biases, logged = _train(None, None)
    assert any(map(any, biases))
    padded = _train(None, LENGTH)
    assert padded[2] == biases
    for rank in run_ranks(2, _train_all):
        for name, found in [("one", padded), *zip(LAYOUTS, rank, strict=True)]:
            assert found[0] == pytest.approx(losses, rel=1e-5), name
            assert found[1] == pytest.approx(norms, rel=1e-5), name
            assert found[3] == pytest.approx(logged, rel=1e-5), name
            if name != "pp2":
                assert found[2] == biases, name


@pytest.mark.parametrize(
    "options",
    [
        {"expert_capacity_factor": 1.0},
        {"expert_capacity_factor": 1.0, "pad_expert_input_to_capacity": True},
        {"mtp_num_layers": 1, "aux_loss_coeff": 1.0},
    ],
    ids=str,
)
def test_capacity_and_predicted_tokens_leave_padding_out(options: dict[str, Any]) -> None:
    """Gradients of a step; sums in another order: 1e-5."""
    depth = {name: options.pop(name) for name in ("mtp_num_layers",) if name in options}
    gradients = []
    for length in (TEXT, 64):
        config = tiny_config(
            moe=MoEConfig(num_experts=4, router_topk=2, **options), max_sequence_length=64, **depth
        )
        module = GPTLightningModule(config)
        module.configure_model()
        rows = [_row(text, length) for text in _texts(2)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        module._loss(batch)[0].backward()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_preferences_leave_padding_out() -> None:
    """As above, for both answers of a pair."""
    gradients = []
    for length in (TEXT, LENGTH):
        module = DPOModule(GPTLightningModule(_config(aux_loss_coeff=1.0)), loss="orpo")
        module.configure_model()
        rows = [_row(text, length) for text in _texts(2)]
        batch = {
            f"{side}{entry}": row[name][None]
            for side, row in zip(("chosen", "rejected"), rows, strict=True)
            for entry, name in (("", "tokens"), ("_labels", "labels"), ("_padding", "padding"))
        }
        module._loss(batch)[0].backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
