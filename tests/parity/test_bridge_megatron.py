"""A fit goes on from a checkpoint of Megatron-Core with its moments, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge.commands import import_
from megatron_lightning.bridge.megatron_checkpoints.megatron import MegatronBridge
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")
from tests.helpers.record_torch_dist import LENGTH, VOCABULARY
from tests.helpers.torch_dist import unpack, write_config

_RATE, _DECAY, _BETAS = 1e-3, 0.1, (0.9, 0.99)


def _rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    return [{"tokens": line[:-1], "labels": line[1:]} for line in text]


_LAYOUTS = {
    "dense": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
    "experts": {"expert_model_parallel_size": 2},
}


def _fit_all(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {case: _fit(folder / f"{case}.ckpt", options) for case, options in _LAYOUTS.items()}


def _fit(checkpoint: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    fit = trainer(MegatronStrategy(**options), max_steps=1)
    module = GPTLightningModule(
        init_from_hf=str(checkpoint), learning_rate=_RATE, weight_decay=_DECAY, betas=_BETAS
    )
    size = 4 // options.get("expert_model_parallel_size", 1)  # data are divided among its ranks
    fit.fit(module, DataLoader(_rows(), batch_size=size), ckpt_path=checkpoint)
    return dict(fit.strategy.full_tensors())


def _by_torch(bridge: MegatronBridge) -> dict[str, Tensor]:
    """Return the weights after a step of torch's AdamW with the moments of the checkpoint."""
    model: Any = bridge.bridge.to_model("gpt", dtype=torch.float32)
    state = bridge.optimizer("gpt")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": _DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, betas=_BETAS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}.master" in state:
                parameter.copy_(state[f"{name}.master"].read())
            optimizer.state[parameter] = {
                key: state[f"{name}.{key}"].read() for key in ("step", "exp_avg", "exp_avg_sq")
            }
    rows = _rows()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    model(batch["tokens"], labels=batch["labels"]).mean().backward()
    optimizer.step()
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_fit_goes_on_with_the_moments_of_megatron(tmp_path: Path) -> None:
    unpack(tmp_path)
    expected = {}
    for case in _LAYOUTS:
        like = write_config(case, tmp_path / f"like-{case}")
        target = str(tmp_path / f"{case}.ckpt")
        import_(str(tmp_path / case), target, like=str(like), dtype="float32")
        expected[case] = _by_torch(MegatronBridge(tmp_path / case, like))
    found, *_ = run_ranks(2, _fit_all, tmp_path)
    for case, weights in expected.items():
        for name, value in weights.items():
            # A step of 1e-3; AdamW divides by roots of small moments, and sums are in other orders.
            assert (found[case][name] - value).abs().max() < 1e-6, f"{case}: {name}"
