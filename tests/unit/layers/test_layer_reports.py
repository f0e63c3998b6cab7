"""StepReport on its own: in plain PyTorch, recomputed, compiled, copied, without gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import StepReport, log_reports
from megatron_lightning.layers.step_report import CurrentMicrobatch, Key, add_up, bind, find_reports


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 2)
        self.report = StepReport()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.report.value("size", x.abs().mean())
        self.report.count("rows", torch.ones(2) * len(x))
        x = self.report.loss("aux", self.gate(x).square().mean(), x)
        return x * 2.0


def _added(layer: Layer, x: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the loss to which the layer's is added, and the latter."""
    hidden = layer.linear(x)
    aux = layer.gate(hidden).square().mean()
    return (hidden * 2.0).sum() + weight * aux, aux


def _gradients(layer: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    return gradients


def _totals(layer: Layer) -> dict[Key, list[float]]:
    return {key: pair.tolist() for key, pair in add_up({"": layer.report}, [1.0]).items()}


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def _checkpointed(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
    return out


@pytest.mark.spread(2)
@pytest.mark.parametrize("way", ["plain", "checkpoint", "reentrant", "compiled"])
def test_gradients_and_sums_of_one_forward(way: str) -> None:
    layer, expected = Layer(), Layer()
    run: Any = {
        "plain": layer,
        "checkpoint": lambda x: _checkpointed(layer, x, False),
        "reentrant": lambda x: _checkpointed(layer, x, True),
        "compiled": torch.compile(layer, backend="aot_eager"),
    }[way]
    # like one of fp16: the scale is found in backward
    scale = layer.report.microbatch.loss_scale
    x = X.clone().requires_grad_()
    loss = run(x).sum()
    scale.follow(loss)
    (loss * 8.0).backward()
    total, aux = _added(expected, X)
    (total * 8.0).backward()
    torch.testing.assert_close(_gradients(layer), _gradients(expected))
    totals = _totals(layer)
    assert totals[Key("aux", "loss")] == [pytest.approx(aux.item()), 1.0]
    assert totals[Key("size", "mean")][1] == 1.0
    assert layer.report.counts["rows"].tolist() == [3.0, 3.0]
    assert _totals(layer) == {}


def test_the_activation_may_be_written_to() -> None:
    x = torch.ones(3, requires_grad=True)
    StepReport().loss("aux", x.sum(), x * 1.0).mul_(2.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_every_forward_has_the_scale_of_its_own_loss() -> None:
    layer, expected = Layer(), Layer()
    for target, weights in ((layer, (3.0, 5.0)), (expected, (3.0, 5.0))):
        for weight in weights:
            if target is layer:
                loss = layer(X).sum()
                layer.report.microbatch.loss_scale.follow(loss)
            else:
                loss, _ = _added(expected, X)
            (loss * weight).backward()
    torch.testing.assert_close(_gradients(layer), _gradients(expected))


def test_the_scale_is_one_alone() -> None:
    layer, expected = Layer(), Layer()
    (layer(X).sum() * 8.0).backward()
    total, _ = _added(expected, X, 1 / 8.0)
    (total * 8.0).backward()
    torch.testing.assert_close(_gradients(layer), _gradients(expected))


def test_without_gradients_values_are_reported_and_nothing_is_attached() -> None:
    layer = Layer().eval()
    with torch.no_grad():
        layer(X)
    assert _totals(layer).keys() == {Key("aux", "loss"), Key("size", "mean")}
    assert layer.report.counts == {}
    layer(X)
    layer.train()
    layer(X)
    assert _totals(layer)[Key("aux", "loss")][1] == 1.0  # not that of another mode


def test_copies_begin_empty_and_alone() -> None:
    holder = nn.Module()
    holder.layers = nn.ModuleList([Layer(), Layer()])
    current = CurrentMicrobatch(is_bound=True)
    release = bind(holder, current)
    holder.layers[0](X)
    for same in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        reports = find_reports(same)
        assert list(reports) == ["layers.0.report", "layers.1.report"]
        for report in reports.values():
            assert not report.microbatch.is_bound
            assert report.take() == report.counts == {}
        same.log = lambda *args, **options: None
        same.layers[0](X)
        log_reports(same)
        assert reports["layers.0.report"].take() == {}  # it was logged
    assert len(holder.layers[0].report.take()) == 2
    release()
    assert not holder.layers[1].report.microbatch.is_bound


def test_what_cannot_be_logged() -> None:
    with pytest.raises(ConfigError, match=r"reports 'size' with the shape \[2\]"):
        StepReport().value("size", torch.ones(2))


class _Module(pl.LightningModule):
    """Two forwards and two backwards in a step, as with manual optimization."""

    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.layer = Layer()
        self.explicit = explicit
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for weight in (1.0, 3.0):
            if self.explicit:
                loss, aux = _added(self.layer, batch)
                self.log("aux", aux)
            else:
                loss = self.layer(batch).sum()
            self.manual_backward(loss * weight if self.explicit else self._scaled(loss, weight))
        self.optimizers().step()
        self.optimizers().zero_grad()

    def _scaled(self, loss: Tensor, weight: float) -> Tensor:
        log_reports(self, loss)
        return loss * weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_manual_optimization() -> None:
    weights = []
    for explicit in (False, True):
        module = _Module(explicit)
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(X, batch_size=1))
        weights.append(list(module.parameters()))
        assert "aux" in trainer.callback_metrics
    torch.testing.assert_close(*weights)
