"""Optimizers that hooks step: as on one device, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DDP2,
    DP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    mean_over_ranks,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader, vectors

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class Own(VectorModule):
    """Steps an optimizer that the Trainer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        self.own = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_after_backward(self) -> None:
        self.own.step()
        self.own.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return None


def _losses(layout: Layout, folder: str) -> list[float]:
    module = Own()
    layout.trainer(folder, max_epochs=1).fit(module, loader(layout, vectors(32)))
    return module.losses


@layouts(DP2, slow=[DDP2])
def test_an_optimizer_of_hooks_alone_steps_full_gradients(layout: Layout, tmp_path: Path) -> None:
    assert_close(mean_over_ranks(run(layout, _losses, tmp_path)), single(_losses))


def _refused(layout: Layout, folder: str) -> str:
    with pytest.raises((ConfigError, PeerFailure)) as caught:
        _losses(layout, folder)
    return "" if isinstance(caught.value, PeerFailure) else str(caught.value)


def test_an_optimizer_of_hooks_alone_is_refused_where_parameters_are_sharded(
    tmp_path: Path,
) -> None:
    texts = run(FSDP2, _refused, tmp_path)
    assert any(texts)
    assert all(not text or "configure_optimizers returned None" in text for text in texts)
