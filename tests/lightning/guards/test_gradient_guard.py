"""Hooks that change gradients of which a rank holds a part are refused; those that clip by all
ranks, or read, pass."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    DP2,
    ONE,
    PP2,
    TP2_TOY,
    Layout,
    layouts,
    make_layout,
    run,
    thinned,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class _ClipsInHook(ToyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.5)


class _ClipsByOptimizer(ToyModule):
    """Change the shards that the optimizer steps under zero1 and fsdp."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)


class _ClipsByCallback(pl.Callback):
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        clip_grad_norm_(pl_module.parameters(), 0.5)


class _Replaces(ToyModule):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


class _ClipsRightly(ToyModule):
    """Reads in one hook, and clips by all ranks in another."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [gradient.norm() for gradient in self.trainer.strategy.gradients().values()]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")


def _refused(
    layout: Layout, folder: str, kind: type[pl.LightningModule] | type[pl.Callback], hook: str
) -> str:
    callbacks = [kind()] if issubclass(kind, pl.Callback) else []
    module = ToyModule() if callbacks else kind()
    with pytest.raises((ConfigError, PeerFailure)) as error:
        layout.trainer(folder, max_steps=1, callbacks=callbacks).fit(
            module, datamodule=layout.data_module()
        )
    return (
        f"{hook} changed the gradient of"  # seen by another rank
        if isinstance(error.value, PeerFailure)
        else str(error.value)
    )


@pytest.mark.parametrize(
    ("layout", "kind", "hook"),
    thinned(
        [
            (
                TP2_TOY,
                _ClipsInHook,
                "on_before_optimizer_step or _ClipsInHook.configure_gradient_clipping",
            ),
            (PP2, _ClipsByCallback, "_ClipsByCallback.on_before_optimizer_step"),
            (DP2, _ClipsByOptimizer, "_ClipsByOptimizer.on_before_optimizer_step"),
            (DP2, _Replaces, "_Replaces.on_after_backward"),
            (FSDP2, _ClipsByOptimizer, "_ClipsByOptimizer.on_before_optimizer_step"),
        ]
    ),
    ids=lambda value: getattr(value, "name", None),
)
def test_changes_of_partial_gradients_are_refused(
    layout: Layout, kind: Any, hook: str, tmp_path: Path
) -> None:
    for text in run(layout, _refused, tmp_path, kind, hook):
        assert hook.split(" or ")[-1] in text, text
        assert "changed the gradient of" in text or "takes norms of p.grad" in text, text


def _steps(
    layout: Layout, folder: str, kind: type[pl.LightningModule], **options: Any
) -> tuple[int, list[str]]:
    trainer = layout.trainer(folder, max_steps=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), datamodule=layout.data_module())
    return trainer.global_step, [
        str(w.message) for w in caught if "strategy.gradient_norm()" in str(w.message)
    ]


@pytest.mark.slow
@layouts(PP2, DP2, TP2_TOY, FSDP2)
def test_clipping_by_all_ranks_and_code_that_does_not_run_pass(
    layout: Layout, tmp_path: Path
) -> None:
    for kind in (_ClipsRightly, _ClipsByStrategy, _ClipsNever):
        assert run(layout, _steps, tmp_path, kind) == [(2, [])] * 2


def test_whole_gradients_may_be_clipped_by_hand(tmp_path: Path) -> None:
    assert run(DDP2, _steps, tmp_path, _ClipsInHook) == [(2, [])] * 2


class _ReadsInHook(ToyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class _ReadsLargest(ToyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.largest = max(float(gradient.detach().abs().max()) for gradient in gradients)


class _ClipsNever(ToyModule):
    """Only names the functions, and asks whether there are gradients."""

    clips = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_trained = sum(p.grad is not None for p in self.parameters())
        if self.clips:
            clip_grad_norm_(self.parameters(), 0.5)
            grad_norm(self, 2)
            for parameter in self.parameters():
                parameter.grad = None


class _ScalesInHook(ToyModule):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class _Drops(ToyModule):
    def on_after_backward(self) -> None:
        next(self.parameters()).grad = None


class _StepsByHand(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(self._loss(batch)[0])
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)


@layouts(TP2_TOY)
def test_reading_a_part_of_the_gradients_is_warned_of_once(layout: Layout, tmp_path: Path) -> None:
    (first, texts), (second, others) = run(layout, _steps, tmp_path, _ReadsLargest)
    assert first == second == 2 and others == []
    assert len(texts) == 1 and "_ReadsLargest.on_before_optimizer_step reads p.grad" in texts[0]


class _ClipsInStep(ToyModule):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()


class _ClipsByStepHook(ToyModule):
    """Between a closure that is called by hand and the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_: clip_grad_norm_(self.parameters(), 0.5) and None
        )
        return optimizer


class _ClipsByHand(ToyModule):
    """Manual optimization; ``clear`` before and between steps is no change."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]

    def _clip(self) -> None:
        clip_grad_norm_(self.parameters(), 0.5)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(self._loss(batch)[0])
        self._clip()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class _ClipsByHandRightly(_ClipsByHand):
    def _clip(self) -> None:
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.5, "norm")


class _ClipsTwice(ToyModule):
    """By all ranks, then by what this rank sees."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 1.0, "norm")
        clip_grad_norm_(self.parameters(), 0.5)


class _ClipsAfterClearing(_ClipsByHand):
    def _clip(self) -> None:
        self.trainer.strategy.gradient_norm()
        self.optimizers()[0].zero_grad()
        clip_grad_norm_(self.parameters(), 0.5)


class _ClipsByStrategy(ToyModule):
    """For several strategies."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if hasattr(self.trainer.strategy, "gradient_norm"):
            self.log("norm", self.trainer.strategy.gradient_norm())
        else:
            clip_grad_norm_(self.parameters(), 0.5)


class _LogsNorms(ToyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._log_norms()

    def _log_norms(self) -> None:
        self.log_dict(grad_norm(self, 2))


class _ReadsNorm(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.nn.utils.get_total_norm(
            [p.grad for p in pl_module.parameters() if p.grad is not None]
        )


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "kind", "text"),
    thinned(
        [
            (DP2, _ClipsInHook, "_ClipsInHook.configure_gradient_clipping uses p.grad"),
            (DP2, _ClipsInStep, "_ClipsInStep.optimizer_step uses p.grad, which is None"),
            (FSDP2, _ClipsInStep, "_ClipsInStep.optimizer_step uses p.grad, which is None"),
            (PP2, _ClipsInStep, "_ClipsInStep.optimizer_step takes norms of p.grad"),
            (DP2, _ReadsInHook, "_ReadsInHook.configure_gradient_clipping uses p.grad"),
            (DP2, _ClipsByStepHook, "<lambda> uses p.grad, which is None"),
            (TP2_TOY, _ClipsByStepHook, "<lambda> takes norms of p.grad"),
            (DP2, _ClipsByHand, "_ClipsByHand.training_step uses p.grad, which is None"),
            (TP2_TOY, _ClipsByHand, "_ClipsByHand.training_step takes norms of p.grad"),
            (DP2, _ClipsTwice, "_ClipsTwice.configure_gradient_clipping uses p.grad"),
            (FSDP2, _ClipsTwice, "_ClipsTwice.configure_gradient_clipping uses p.grad"),
            (DP2, _ClipsAfterClearing, "_ClipsAfterClearing.training_step uses p.grad"),
            (DP2, _ScalesInHook, "_ScalesInHook.on_after_backward uses p.grad"),
            (FSDP2, _ScalesInHook, "_ScalesInHook.on_after_backward uses p.grad"),
            (DP2, _StepsByHand, "_StepsByHand.training_step uses p.grad"),
            (DP2, _LogsNorms, "_LogsNorms.on_before_optimizer_step uses p.grad, which is None"),
            (TP2_TOY, _LogsNorms, "_LogsNorms.on_before_optimizer_step takes norms of p.grad"),
            (PP2, _ReadsNorm, "_ReadsNorm.on_after_backward takes norms of p.grad"),
            (FSDP2, _ReadsNorm, "_ReadsNorm.on_after_backward uses p.grad"),
        ]
    ),
    ids=lambda value: getattr(value, "name", None),
)
def test_norms_of_what_one_rank_has_are_refused(
    layout: Layout, kind: Any, text: str, tmp_path: Path
) -> None:
    texts = run(layout, _refusal, tmp_path, kind)
    assert any(texts)
    for found in texts:
        assert not found or (text in found and "strategy.gradient_norm()" in found), found


def test_dropping_a_gradient_that_no_rank_has_is_refused(tmp_path: Path) -> None:
    texts = run(DP2, _refusal, tmp_path, _Drops)
    assert any("_Drops.on_after_backward sets p.grad to None" in text for text in texts), texts


def _refusal(
    layout: Layout, folder: str, kind: type[pl.LightningModule] | type[pl.Callback]
) -> str:
    callbacks = [kind()] if issubclass(kind, pl.Callback) else []
    module = ToyModule() if callbacks else kind()
    with pytest.raises((ConfigError, PeerFailure)) as error:
        layout.trainer(folder, max_steps=1, callbacks=callbacks).fit(
            module, datamodule=layout.data_module()
        )
    return "" if isinstance(error.value, PeerFailure) else str(error.value)


@layouts(DP2, slow=[TP2_TOY])
def test_manual_optimization_that_clips_by_all_ranks_passes(layout: Layout, tmp_path: Path) -> None:
    assert run(layout, _steps, tmp_path, _ClipsByHandRightly) == [(2, [])] * 2


def test_full_gradients_may_be_clipped_in_a_step(tmp_path: Path) -> None:
    for kind in (_ClipsInStep, _ClipsByStepHook, _ClipsByHand, _LogsNorms):
        trainer = ONE.trainer(str(tmp_path), max_steps=2)
        trainer.fit(kind(), datamodule=ONE.data_module())
        assert trainer.global_step >= 2 or kind is _ClipsByStepHook
