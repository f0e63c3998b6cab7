"""A user's ``optimizer_zero_grad`` clears the gradients, or is refused where none can be left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DDP2,
    DP2,
    PP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class _Clears(VectorModule):
    """As Lightning's documentation shows it, by the optimizer, its wrapper, the module or each
    parameter.
    """

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx == 0:
            optimizer.zero_grad(set_to_none=True)
        elif batch_idx == 1:
            self.optimizers().zero_grad()
        elif batch_idx == 2:
            self.zero_grad()
        elif batch_idx == 3:
            for parameter in self.parameters():
                parameter.grad = None
        else:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class _Piles(VectorModule):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def _fit(layout: Layout, folder: str, kind: type[VectorModule]) -> dict[str, Any]:
    trainer, module = layout.trainer(folder, max_epochs=2), kind()
    trainer.fit(module, loader(layout), loader(layout))
    return {} if layout.name == PP2.name else {n: p.detach() for n, p in module.named_parameters()}


@layouts(DP2, slow=[PP2, DDP2])
def test_hooks_that_clear_pass(layout: Layout, tmp_path: Path) -> None:
    for weights in run(layout, _fit, tmp_path, _Clears):
        if weights:
            assert_close(weights, single(_fit, _Clears))


def _refusal(layout: Layout, folder: str) -> str:
    with pytest.raises((ConfigError, PeerFailure)) as error:
        _fit(layout, folder, _Piles)
    return "" if isinstance(error.value, PeerFailure) else str(error.value)


@layouts(DP2, PP2, slow=[FSDP2])
def test_hooks_that_leave_gradients_are_refused(layout: Layout, tmp_path: Path) -> None:
    texts = run(layout, _refusal, tmp_path)
    assert any(texts)
    for text in texts:
        assert not text or "Trainer(accumulate_grad_batches=...)" in text, text
