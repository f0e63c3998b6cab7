"""Checkpoints of optimizers that read full tensors: on the same layout, and on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import AnyLayout, fit, tiny_config, token_rows
from tests.helpers.ranks import run_ranks

CONFIG = tiny_config()
STEPS, HALF, BATCH = 4, 2, 4
ZERO1: AnyLayout = "dp2-zero1"


class Factored(GPTLightningModule):
    """Second moments of rows and columns."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's Adafactor."""
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def _fit(layout: AnyLayout, steps: int, load: str | None = None, save: str = "") -> list[float]:
    rows = token_rows(STEPS * BATCH, CONFIG.max_sequence_length, CONFIG.vocab_size)
    loader = DataLoader(rows, batch_size=BATCH // 2 if layout == ZERO1 else BATCH)
    run = fit(layout, Factored(CONFIG), loader, steps=steps, ckpt_path=load)
    if save:
        run.trainer.save_checkpoint(save)
    return run.losses


def _on_ranks(folder: str) -> tuple[list[float], list[float], list[float]]:
    half = f"{folder}/half.ckpt"
    whole = _fit(ZERO1, STEPS)
    first = _fit(ZERO1, HALF, save=half)
    same = _fit(ZERO1, STEPS, half)
    return whole, first + same, _fit("tp2", STEPS, half)


@pytest.mark.slow
def test_factors_resume_on_any_layout(tmp_path: Path) -> None:
    ranks = run_ranks(2, _on_ranks, str(tmp_path))
    for whole, resumed, _ in ranks:
        assert resumed == whole
    expected = [sum(losses) / 2 for losses in zip(*(whole for whole, *_ in ranks), strict=True)]
    for _, _, other in ranks:  # sums in another order, in fp32
        assert other == pytest.approx(expected[HALF:], rel=1e-5)
    alone = _fit(None, STEPS)
    assert expected == pytest.approx(alone, rel=1e-5)
    assert _fit("one", STEPS, f"{tmp_path}/half.ckpt") == pytest.approx(alone[HALF:], rel=1e-5)
