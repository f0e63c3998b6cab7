"""Hooks that change gradients of which a rank holds a part are refused; those that clip by all
ranks, or read, pass."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import DDP2, DP2, PP2, TP2_TOY, Layout, layouts, make_layout, run

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
        f"{hook} changed the gradient of"
        if isinstance(error.value, PeerFailure)
        else str(error.value)
    )


@pytest.mark.parametrize(
    ("layout", "kind", "hook"),
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
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_changes_of_partial_gradients_are_refused(
    layout: Layout, kind: Any, hook: str, tmp_path: Path
) -> None:
    for text in run(layout, _refused, tmp_path, kind, hook):
        assert hook.split(" or ")[-1] in text and "changed the gradient of" in text, text


def _steps(
    layout: Layout, folder: str, kind: type[pl.LightningModule], **options: Any
) -> tuple[int, list[str]]:
    trainer = layout.trainer(folder, max_steps=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), datamodule=layout.data_module())
    return trainer.global_step, [
        str(w.message) for w in caught if "did not call clip_gradients" in str(w.message)
    ]


@layouts(DP2, PP2, slow=[TP2_TOY, FSDP2])
def test_clipping_by_all_ranks_and_reading_pass(layout: Layout, tmp_path: Path) -> None:
    assert run(layout, _steps, tmp_path, _ClipsRightly) == [(2, [])] * 2


def test_whole_gradients_may_be_clipped_by_hand(tmp_path: Path) -> None:
    assert run(DDP2, _steps, tmp_path, _ClipsInHook) == [(2, [])] * 2


def test_clipping_where_no_parameter_has_a_gradient_is_warned_of_once(tmp_path: Path) -> None:
    (first, texts), (second, others) = run(DP2, _steps, tmp_path, _ClipsInHook)
    assert (
        first == second == 2 and len(texts) == 1 and "p.grad is None" in texts[0] and others == []
    )
