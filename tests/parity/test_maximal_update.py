"""Maximal updates on ranks: the losses and groups of one process. fp32, sums in another order."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import MaximalUpdate
from tests.helpers.layouts import BATCH, fit, tiny_config, token_rows
from tests.helpers.ranks import run_ranks

Trained = tuple[list[float], list[float], dict[str, tuple[float, float]]]
CONFIG = tiny_config(hidden_size=64, qk_layernorm=True)
RULE = MaximalUpdate(base_width=16, base_depth=1)
LAYOUTS = ("tp2", "pp2", "dp2-zero1")


def trained(layouts: tuple[str, ...]) -> list[Trained]:
    """Return losses, gradient norms, and rate and weight decay of each group, for each layout."""
    results = []
    for layout in layouts:
        module = GPTLightningModule(CONFIG, learning_rate=1e-2, maximal_update=RULE)
        run = fit(layout, module, _rows(layout), steps=4, gradient_clip_val=1.0)
        groups = run.trainer.optimizers[0].param_groups
        results.append(
            (run.losses, run.norms, {g["name"]: (g["lr"], g["weight_decay"]) for g in groups})
        )
    return results


def _rows(layout: str) -> DataLoader[object]:
    rows = token_rows(4 * BATCH, CONFIG.max_sequence_length, CONFIG.vocab_size)
    return DataLoader(rows, batch_size=BATCH // (2 if layout == "dp2-zero1" else 1))


@pytest.mark.slow
def test_losses_and_groups_are_those_of_one_process() -> None:
    ((expected,),) = run_ranks(1, trained, ("one",))
    losses, norms, groups = expected
    assert len(groups) > 4 and len({*losses}) == 4
    ranks = run_ranks(2, trained, LAYOUTS)
    for layout, *results in zip(LAYOUTS, *ranks, strict=True):
        means = [sum(step) / 2 for step in zip(*(own for own, _, _ in results), strict=True)]
        assert means == pytest.approx(losses, rel=1e-5), layout
        assert results[0][1] == pytest.approx(norms, rel=1e-4), layout
        assert all(own == groups for _, _, own in results), layout
