"""Averages of the model that hooks keep: those that mix layers of pipeline stages are refused after
the first step, and copies that stay equal run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from megatron_lightning.errors import ShardingError
from tests.lightning.support import (
    DDP2,
    PP2,
    Layout,
    assert_close,
    layouts,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader


class _Copy(nn.Module):
    """As timm's ModelEmaV2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for own, other in zip(
                self.module.state_dict().values(), model.state_dict().values(), strict=False
            ):
                own.copy_(0.5 * own + 0.5 * other)


class _Averages(VectorModule):
    """Averages a copy of its model in a hook of every batch."""

    def __init__(self, make: Callable[[nn.Module], Any], update: Callable[[Any, Any], None]):
        super().__init__(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        self.average, self.update = make(self.net), update

    def on_train_batch_end(self, *_: Any) -> None:
        self.update(self.average, self.net)


class _InCallback(pl.Callback):
    """Keeps the average outside of the module."""

    def __init__(self, model: nn.Module) -> None:
        self.average = _Copy(model)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.average.update(module.net)


def _lerp(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for own, other in zip(teacher.parameters(), student.parameters(), strict=False):
            own.lerp_(other, 0.5)


def _teacher(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Any], None]]] = {
    "timm": (_Copy, lambda average, model: average.update(model)),
    "torch": (AveragedModel, lambda average, model: average.update_parameters(model)),
    "teacher": (_teacher, _lerp),
}


def _module(way: str) -> tuple[VectorModule, list[pl.Callback]]:
    if way != "callback":
        return _Averages(*WAYS[way]), []
    module = VectorModule(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    return module, [_InCallback(module.net)]


def _mixed(layout: Layout, folder: str, way: str) -> int:
    module, callbacks = _module(way)
    fit = layout.trainer(folder, max_epochs=1, callbacks=callbacks)
    with pytest.raises(ShardingError, match=r"aver.*weight.* Usual causes.* EMAWeightAveraging"):
        fit.fit(module, loader(layout))
    return fit.global_step


@pytest.mark.spread(1)
@pytest.mark.parametrize("way", [*WAYS, "callback"])
def test_averages_that_mix_layers_are_refused_before_the_second_step(
    way: str, tmp_path: Path
) -> None:
    assert run(PP2, _mixed, tmp_path, way) == [1, 1]


class _OnRankZero(pl.Callback):
    """Keeps a copy on rank 0 alone, as many averages do, or adds a tensor there."""

    def __init__(self, model: nn.Module, hook: str, kind: str) -> None:
        self._full = (copy.deepcopy(model),)
        self.average: nn.Module | None = None
        setattr(self, hook, rank_zero_only(getattr(self, f"_{kind}")))

    def _copy(self, trainer: pl.Trainer, module: Any, **_: Any) -> None:
        self.average = self._full[0]

    def _parameter(self, trainer: pl.Trainer, module: Any, **_: Any) -> None:
        module.register_parameter("own", nn.Parameter(torch.zeros(2)))

    def _buffer(self, trainer: pl.Trainer, module: Any, **_: Any) -> None:
        module.register_buffer("own", torch.zeros(2))


def _alone(layout: Layout, folder: str, hook: str, kind: str) -> str:
    module = VectorModule(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    callback = _OnRankZero(module.net, hook, kind)
    fit = layout.trainer(folder, max_epochs=1, callbacks=[callback])
    with pytest.raises(ShardingError) as error:
        fit.fit(module, loader(layout), loader(layout))
    return str(error.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "hook", "kind"),
    [
        pytest.param(layout, hook, kind, id=f"{layout.name}-{hook}-{kind}")
        for layout, hook, kind in (
            (PP2, "setup", "copy"),
            (PP2, "on_train_start", "buffer"),
            (DDP2, "on_train_start", "parameter"),
            (DDP2, "setup", "buffer"),
        )
    ],
)
def test_what_one_rank_alone_holds_is_refused(
    layout: Layout, hook: str, kind: str, tmp_path: Path
) -> None:
    for error in run(layout, _alone, tmp_path, hook, kind):
        assert re.match(r"rank 0 holds \d+ tensor\(s\) that other .*(average|own)", error)


class _Distills(VectorModule):
    """Reads a frozen copy of its first weights, as preference tuning does."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        self.reference = _teacher(self.net)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        target = self.reference(batch[0]).sin()
        loss = (self.net(batch[0]) - target).square().mean()
        self.log("loss", loss)
        return loss


def _distilled(layout: Layout, folder: str) -> dict[str, float]:
    fit = layout.trainer(folder, max_epochs=2)
    fit.fit(_Distills(), loader(layout))
    return metrics_of(fit)


@pytest.mark.slow
@layouts(PP2)
def test_a_frozen_copy_is_as_on_one_device(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _distilled, tmp_path):
        assert_close(rank, single(_distilled))
