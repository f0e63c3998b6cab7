"""Routes in the batch: replayed alike on every layout, and trained as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import tiny_config
from tests.lightning.support import Layout, assert_close, layouts, make_layout, run, single

CONFIG = tiny_config(
    vocab_size=20,
    max_sequence_length=8,
    mtp_num_layers=1,
    moe=MoEConfig(num_experts=4, router_topk=2),
    init_method_std=0.02,
)
TP, CP = "tensor_model_parallel_size", "context_parallel_size"
TP2 = make_layout("tp2", 2, 1, **{TP: 2})
CP2 = make_layout("cp2", 2, 1, **{CP: 2})
EP2 = make_layout("ep2", 2, 2, expert_model_parallel_size=2)
PP2 = make_layout("pp2", 2, 1, pipeline_model_parallel_size=2, micro_batch_size=2)
FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
TP2_CP2 = make_layout("tp2-cp2", 4, 1, **{TP: 2, CP: 2})


def _rows(*, replays: bool) -> list[dict[str, Tensor]]:
    """Return rows with random experts, and a fifth of the tokens left to the routers."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(16):
        tokens = torch.randint(20, (9,), generator=generator)
        routes = torch.rand(8, 2, 4, generator=generator).topk(2).indices
        routes[torch.rand(8, generator=generator) < 0.2] = -1
        row = {"tokens": tokens[:-1], "labels": tokens[1:]}
        rows.append({**row, "routes": routes} if replays else row)
    return rows


def _weights(layout: Layout, folder: str, replays: bool = True) -> dict[str, Any]:
    trainer, module = layout.trainer(folder, max_epochs=2), GPTLightningModule(CONFIG)
    rows: Any = _rows(replays=replays)
    trainer.fit(module, DataLoader(rows, batch_size=8 // layout.data))
    if layout.options is None:
        return dict(module.state_dict())
    return dict(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]


@pytest.mark.spread(1)
@layouts(TP2, CP2, EP2, PP2, slow=[FSDP2, TP2_CP2])
def test_a_replay_trains_as_on_one_device(layout: Layout, tmp_path: Path) -> None:
    expected = single(_weights)
    assert_close(run(layout, _weights, tmp_path)[0], expected)


def test_routes_change_what_is_trained() -> None:
    replayed, own = single(_weights), single(_weights, False)
    assert any(not torch.equal(own[name], value) for name, value in replayed.items())
