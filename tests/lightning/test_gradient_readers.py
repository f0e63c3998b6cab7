"""A hook that clips what one rank holds is refused; a norm of it that is logged is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.gradient_readers import check_gradient_readers
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer


class ClipsInHook(ToyModule):
    @torch.no_grad()
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class ClipsInStep(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def clip() -> None:
            clip_grad_norm_(self.parameters(), 0.5)

        clip()
        return super().training_step(batch, batch_idx)


class Chooses(ToyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if isinstance(self.trainer.strategy, FSDPStrategy):
            self.trainer.strategy.model.clip_grad_norm_(0.5)
        else:
            self.clip_gradients(optimizer, 0.5, "norm")


def _clip(module: pl.LightningModule) -> None:
    clip_grad_norm_(module.parameters(), 0.5)


class ClipsInHelper(ToyModule):
    """By way of a method of its own, and of a function."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.limit()

    def limit(self) -> None:
        _clip(self)


class _Timed:
    """A decorator that is no function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)


class Decorated(ToyModule):
    @wraps(_Timed(ToyModule.on_train_start))
    def on_train_start(self) -> None:
        return None


class ClipsValues(ToyModule):
    def on_after_backward(self) -> None:
        clip_grad_value_(self.parameters(), 0.5)


class LogsNorms(ToyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ClippingCallback(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        clip_grad_norm_(pl_module.parameters(), 0.5)


PP2 = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "message"),
    [
        (
            ClipsInHook,
            [],
            {},
            r'configure_gradient_clipping calls clip_grad_norm_.*data_parallel="zero1" over 2.*clip_gradients',
        ),
        (ClipsInHook, [], PP2, r"configure_gradient_clipping calls clip_grad_norm_.*tensor 1 x pipeline 2"),
        (ClipsInStep, [], {}, "ClipsInStep.training_step calls clip_grad_norm_"),
        (ClipsInHelper, [], {}, "ClipsInHelper.on_before_optimizer_step calls clip_grad_norm_"),
        (ClipsValues, [], {}, "ClipsValues.on_after_backward calls clip_grad_value_"),
        (ToyModule, [ClippingCallback()], {}, "ClippingCallback.on_before_optimizer_step calls clip_grad_norm_"),
    ],
)
def test_clipping_by_hand_is_refused_before_any_process_starts(
    module: type[pl.LightningModule], callbacks: list[pl.Callback], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(MegatronStrategy(**options), devices=2, max_steps=1, callbacks=callbacks).fit(module(), ToyData())
    assert not dist.is_initialized()


@pytest.mark.parametrize("module", [Chooses, Decorated])
def test_hooks_that_clip_rightly_or_not_at_all_pass(module: type[pl.LightningModule]) -> None:
    strategy = MegatronStrategy()
    run = trainer(strategy, devices=2, max_steps=1)
    run.strategy.connect(module())
    check_gradient_readers(run, strategy.layout, strategy.data_parallel, 2)


@pytest.mark.parametrize(("module", "options"), [(ClipsInHook, {}), (ClipsValues, PP2)])
def test_whole_gradients_may_be_clipped_by_hand(module: type[pl.LightningModule], options: dict[str, Any]) -> None:
    """Under ddp every rank has the whole gradient; and to clip values needs no whole one."""
    strategy = MegatronStrategy(data_parallel="ddp", **options)
    run = trainer(strategy, devices=2, max_steps=1)
    run.strategy.connect(module())
    check_gradient_readers(run, strategy.layout, strategy.data_parallel, 1 if options else 2)


def test_logged_norms_are_warned_of() -> None:
    strategy = MegatronStrategy()
    run = trainer(strategy, devices=2, max_steps=1)
    run.strategy.connect(LogsNorms())
    with pytest.warns(UserWarning, match="on_before_optimizer_step calls grad_norm.*GradientNormMonitor logs"):
        check_gradient_readers(run, strategy.layout, strategy.data_parallel, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gradient_readers(run, strategy.layout, "ddp", 2)
