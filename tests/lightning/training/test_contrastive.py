"""A loss over the global batch, by steps that call the pipeline themselves."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from megatron_lightning.config import PipelineOptions
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "contrastive.py"
PP, MICRO = "pipeline_model_parallel_size", "micro_batch_size"


def _train(options: dict[str, Any] | None, data: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    module = runpy.run_path(str(EXAMPLE))["Contrastive"]()
    first = torch.randn(24, 16)
    views = TensorDataset(first, first + 0.3 * torch.randn_like(first))
    if options is not None:
        options = {"pipeline_options": PipelineOptions(explicit_steps=True), **options}
    return fit_losses(options, module, DataLoader(views, batch_size=8 // data), steps=3)


def _all_at_once() -> tuple[list[float], list[float]]:
    """Train by autograd through the loss of the full batch."""
    torch.manual_seed(0)
    module = runpy.run_path(str(EXAMPLE))["Contrastive"]()
    first = torch.randn(24, 16)
    second = first + 0.3 * torch.randn_like(first)
    losses, norms, optimizer = [], [], module.configure_optimizers()
    for views in zip(first.split(8), second.split(8), strict=True):
        loss = module.contrast(module.embed(list(views)))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(grads).item())
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize(
    ("world", "data", "options"),
    [
        (1, 1, None),
        (1, 1, {MICRO: 2}),
        (2, 1, {PP: 2, MICRO: 2}),
        pytest.param(4, 2, {PP: 2, MICRO: 2}, marks=pytest.mark.slow),
        pytest.param(2, 2, {MICRO: 2, "data_parallel": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "micro", "pp", "pp-dp", "fsdp"],
)
def test_a_contrastive_loss_sees_the_global_batch(
    world: int, data: int, options: dict[str, Any] | None
) -> None:
    losses, norms = _all_at_once()
    for own, own_norms in run_ranks(world, _train, options, data):
        # fp32, sums in another order; SGD does not amplify them.
        assert own == pytest.approx(losses, rel=1e-6)
        assert own_norms == pytest.approx(norms, rel=3e-6)
