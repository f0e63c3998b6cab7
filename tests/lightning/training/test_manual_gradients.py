"""Manual optimization whose gradients are cleared never, by the module, or computed by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import (
    DDP2,
    DP2,
    Layout,
    assert_close,
    layouts,
    run,
    single,
)
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


class _ClearsByNone(_Manual):
    def _compute(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.grad = None
        self.manual_backward(loss)


class _ClearsByNoneBehind(_Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for parameter in self.net.parameters():
            parameter.grad = None


class _ClearsSomeByNone(_Manual):
    """The others pile up, and are seen as such on one device as well."""

    def _compute(self, loss: Tensor) -> None:
        self.net[0].weight.grad = None
        self.manual_backward(loss)


class _ClearsInHook(_Manual):
    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.grad = None


class _ClearsByZeros(_Manual):
    def _compute(self, loss: Tensor) -> None:
        self.optimizers().zero_grad(set_to_none=False)
        self.manual_backward(loss)


class _TwoOptimizers(_Manual):
    """The first loss leaves gradients with the second optimizer, as that of a generator with its
    judge. They are cleared before the second backward pass."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[:2].parameters(), lr=0.1),
            torch.optim.SGD(self.net[2:].parameters(), lr=0.1),
        ]


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


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "kind",
    [
        *(_Manual, _ClearsByModule, _ClearsBySubModule),
        *(_ClearsByNone, _ClearsByNoneBehind, _ClearsSomeByNone),
    ],
)
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


def _warnings(layout: Layout, folder: str, *kinds: type[_Manual]) -> list[bool]:
    found = []
    for kind in kinds:
        trainer = layout.trainer(folder, max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(kind(), loader(layout))
        texts = [str(warning.message) for warning in caught]
        found.append(any("Call optimizer.zero_grad()" in text for text in texts))
    return found


@pytest.mark.slow
@layouts(DP2)
def test_a_step_by_gradients_of_earlier_steps_is_named(layout: Layout, tmp_path: Path) -> None:
    """Only on the first rank, as all warnings."""
    named = [_ClearsInHook, _Manual]
    clear = [_ClearsByNone, _ClearsByZeros, _ClearsByModule, _TwoOptimizers]
    [first, *_] = run(layout, _warnings, tmp_path, *named, *clear)
    assert first == [*[True] * len(named), *[False] * len(clear)]
