"""Manual optimization whose gradients are cleared never, by the module, or computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import DDP2, DP2, Layout, assert_close, layouts, run, single
from tests.lightning.vectors import VectorModule, loader


class _Manual(VectorModule):
    """Validates every two batches, before which Lightning calls the module's ``zero_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._compute(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.optimizers().step()

    def _compute(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _ClearsByModule(_Manual):
    def _compute(self, loss: Tensor) -> None:
        self.zero_grad()
        self.manual_backward(loss)


class _ClearsBySubModule(_Manual):
    def _compute(self, loss: Tensor) -> None:
        self.net.zero_grad()
        self.manual_backward(loss)


class _CallsBackward(_Manual):
    def _compute(self, loss: Tensor) -> None:
        self.optimizers().zero_grad()
        loss.backward()


class _Assigns(_Manual):
    def _compute(self, loss: Tensor) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient


def _weights(layout: Layout, folder: str, kind: type[_Manual]) -> dict[str, Any]:
    trainer, module = layout.trainer(folder, max_epochs=2, val_check_interval=2), kind()
    trainer.fit(module, loader(layout), loader(layout))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", [_Manual, _ClearsByModule, _ClearsBySubModule])
@layouts(DP2, slow=[DDP2])
def test_gradients_are_cleared_when_the_module_clears_them(
    layout: Layout, kind: type[_Manual], tmp_path: Path
) -> None:
    expected = single(_weights, kind)
    for weights in run(layout, _weights, tmp_path, kind):
        assert_close(weights, expected)


def _refusal(layout: Layout, folder: str, kind: type[_Manual]) -> str:
    with pytest.raises((ConfigError, PeerFailure)) as error:
        _weights(layout, folder, kind)
    return "" if isinstance(error.value, PeerFailure) else str(error.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", [_CallsBackward, _Assigns])
@layouts(DP2, DDP2)
def test_gradients_of_one_rank_are_refused(
    layout: Layout, kind: type[_Manual], tmp_path: Path
) -> None:
    texts = run(layout, _refusal, tmp_path, kind)
    assert any(texts)
    for text in texts:
        assert not text or "Call self.manual_backward(loss)" in text, text
