"""A step that runs again before its update: equal bit by bit, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.callbacks import SpikeGuard
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.step.agreed_stop import AgreedStop
from megatron_lightning.strategies import MegatronFP8Precision, RerunResult
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    DP2,
    GLOBAL_BATCH,
    MICRO,
    ONE,
    PP2,
    TP2_PP2,
    Layout,
    layouts,
    make_layout,
    run,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
STEPS = 4
RERUN = 2  # steps


class _Drawing(ToyModule):
    """Dropout, and a buffer that the step reads and writes."""

    def __init__(self) -> None:
        super().__init__(mask=True)
        self.register_buffer("average", torch.zeros(()))
        self.broken: str | None = None
        self.runs = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"]
        with torch.no_grad():
            self.average.mul_(0.5).add_(loss)
        output["loss"] = F.dropout(loss, 0.5) + loss * (1 + self.average)
        return output


class _Again(pl.Callback):
    """Runs steps again in a hook."""

    def __init__(self, hook: str, *, broken: bool = False) -> None:
        self.results: list[RerunResult] = []
        self.broken = broken
        setattr(self, hook, self._rerun)

    def _rerun(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step >= RERUN and not self.results:
            weight = next(module.parameters())
            if self.broken and trainer.global_rank == trainer.world_size - 1:
                # A broken device: another product than the first time.
                handle = nn.modules.module.register_module_forward_hook(_flip)
            self.results.append(trainer.strategy.rerun_step())
            if self.broken and trainer.global_rank == trainer.world_size - 1:
                handle.remove()
            assert weight is next(module.parameters())


def _flip(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.001 if isinstance(module, nn.LayerNorm) else None


def _fit(
    layout: Layout,
    folder: str,
    *callbacks: pl.Callback,
    num_batches: int = STEPS,
    **options: Any,
) -> dict[str, Any]:
    module = _Drawing()
    every = options.get("accumulate_grad_batches", 1)
    trainer = layout.trainer(
        folder, callbacks=list(callbacks), **{"max_epochs": 1, "gradient_clip_val": 1.0, **options}
    )
    pl.seed_everything(3)
    data = layout.data_module(num_samples=num_batches * GLOBAL_BATCH * every)
    code = 0
    try:
        trainer.fit(module, datamodule=data)
    except AgreedStop as stop:
        code = int(stop.code)  # type: ignore[arg-type]
    results = [result for c in callbacks if isinstance(c, _Again) for result in c.results]
    return {
        "weights": [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()],
        "average": module.average.clone(),
        "logged": float(trainer.callback_metrics.get("tokens", 0)),
        "results": [(r.reproducible, r.loss, r.loss_again, r.differences) for r in results],
        "code": code,
        "consumed": trainer.strategy.consumed_samples,
    }


def _both(layout: Layout, folder: str, hook: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [_fit(layout, folder, **options), _fit(layout, folder, _Again(hook), **options)]


@layouts(ONE, slow=[PP2, MICRO, DP2, DDP2, TP2_PP2, FSDP2])
@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("on_before_optimizer_step", {"accumulate_grad_batches": 2}),
        pytest.param("on_after_backward", {}, marks=pytest.mark.slow),
        pytest.param(
            "on_before_optimizer_step", {"precision": "bf16-mixed"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_rerun_has_the_same_bits_and_leaves_no_trace(
    layout: Layout, hook: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for undisturbed, rerun in run(layout, _both, tmp_path, hook, options):
        [(reproducible, loss, again, differences)] = rerun["results"]
        assert reproducible and differences == () and loss == again and loss > 0, differences
        assert all(map(torch.equal, undisturbed["weights"], rerun["weights"]))
        for key in ("average", "logged", "consumed"):
            assert undisturbed[key] == rerun[key], key


def _broken(layout: Layout, folder: str) -> list[dict[str, Any]]:
    undisturbed = _fit(layout, folder)
    return [undisturbed, _fit(layout, folder, _Again("on_before_optimizer_step", broken=True))]


@layouts(DP2, slow=[PP2])
def test_a_broken_device_is_named_and_does_no_harm(layout: Layout, tmp_path: Path) -> None:
    for undisturbed, rerun in run(layout, _broken, tmp_path):
        [(reproducible, loss, again, differences)] = rerun["results"]
        assert not reproducible and loss != again
        assert any("loss of micro-batch 0" in text for text in differences), differences
        assert (
            all("rank 1: loss" in text for text in differences if "loss" in text) or layout is PP2
        )
        assert all(map(torch.equal, undisturbed["weights"], rerun["weights"]))


def _stopped(layout: Layout, folder: str) -> dict[str, Any]:
    guard = SpikeGuard(window=2, min_steps=2, sigma=1e-6, action="stop", rerun=True)
    return _fit(layout, folder, guard, num_batches=20)  # dropout doubles some losses


def test_a_stop_at_a_spike_that_comes_again_has_a_code_of_its_own(tmp_path: Path) -> None:
    [stopped] = run(ONE, _stopped, tmp_path)
    assert stopped["code"] == 16
    assert (tmp_path / "spikes.json").is_file()
    assert RerunResult(False, 1.0, 2.0, ("rank 1: loss",)).exit_code == 17


class _Wrong(pl.Callback):
    """Runs the first step again, in a hook."""

    def __init__(self, hook: str = "on_train_batch_start") -> None:
        setattr(self, hook, lambda trainer, *_: trainer.strategy.rerun_step())


class _Writing(ToyModule):
    """Writes into its batch, on the last rank alone."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if self.global_rank == self.trainer.world_size - 1:
            batch["ids"].add_(0)
        return super().training_step(batch, batch_idx)


class _ByHand(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Late(ToyModule):
    """Writes a buffer from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if self.global_step >= RERUN:
            self.seen += 1
        return super().training_step(batch, batch_idx)


class _Asks(pl.Callback):
    """Asks twice in every step from the third on, and notes the answers."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= RERUN:
            self._ask(trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.on_after_backward(trainer)

    def _ask(self, trainer: Any) -> None:
        try:
            self.answers.append(str(trainer.strategy.rerun_step().reproducible))
        except ConfigError as error:
            self.answers.append(str(error))


def test_reruns_that_cannot_be_right_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(module: ToyModule, callback: pl.Callback, **options: Any) -> None:
        trainer = ONE.trainer(str(tmp_path), callbacks=[callback], max_epochs=1, **options)
        trainer.fit(module, datamodule=ONE.data_module())

    with pytest.raises(ConfigError, match="called without a step that waits for its update"):
        fit(ToyModule(), _Wrong())
    with pytest.raises(ConfigError, match="the module optimizes by hand"):
        fit(_ByHand(), _Wrong())
    delayed = MegatronFP8Precision(FP8Recipe(scaling="delayed"))
    with pytest.raises(ConfigError, match="histories, which the first run of a step has advanced"):
        fit(ToyModule(), _Again("on_after_backward"), plugins=[delayed])
    asks = _Asks()
    fit(_Late(), asks)
    refused, again, *later = asks.answers
    assert "the buffer seen was written for the first time" in refused and again == refused
    assert later == ["True"] * len(later) and later
    monkeypatch.setattr("megatron_lightning.step.repeats.recorded_step.HELD_BYTES", 1)
    with pytest.raises(ConfigError, match="MiB are held for a rerun"):
        fit(ToyModule(), _Wrong("on_before_optimizer_step"), accumulate_grad_batches=2)


def _refused(layout: Layout, folder: str) -> list[str]:
    asks = _Asks()
    trainer = layout.trainer(folder, callbacks=[asks], max_epochs=1)
    trainer.fit(_Writing(), datamodule=layout.data_module())
    return asks.answers


def test_a_rank_that_cannot_run_again_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run(DP2, _refused, tmp_path)
    assert first == second and first
    assert all("has written into its batch" in answer for answer in first)
