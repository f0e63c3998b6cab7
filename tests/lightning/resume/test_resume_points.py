"""Stops at events of a fit, resumed from their checkpoints, equal the fit that never stopped: data,
losses, validations, hooks, random states and buffers, to the bit."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning import compat
from megatron_lightning.callbacks import RescueCheckpoint
from megatron_lightning.lightning_internals.loops import loop_state
from megatron_lightning.resilience.failure_watch import FailureWatch
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import DP2, PP2, Layout, layouts, run

BATCH = 2


class _Fault(Exception):
    """Raised on purpose."""


@dataclass(frozen=True)
class Fit:
    """Settings of a fit."""

    loader: str = "shuffled"
    num_samples: int = 10
    epochs: int = 2
    max_steps: int = -1
    accumulate: int = 1
    interval: float = 1.0
    every_n_epochs: int | None = 1
    limit: float = 1.0


class _Batches:
    """A loader with a state, over shuffled batches of a generator of its own."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.generator = torch.Generator().manual_seed(3)
        self.before = self.generator.get_state()
        self.position = self.skipped = 0

    def __len__(self) -> int:
        return self.num_samples // BATCH

    def __iter__(self) -> Iterator[Tensor]:
        if self.skipped:
            self.generator.set_state(self.before)
        self.before = self.generator.get_state()
        self.position, self.skipped = self.skipped, 0
        order = torch.randperm(self.num_samples, generator=self.generator).view(-1, BATCH)
        while self.position < len(self):
            self.position += 1
            yield torch.stack([_sample(int(index)) for index in order[self.position - 1]])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.before = state["position"], state["before"]


class _Unsized(_Batches):
    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        sized = _Batches(self.num_samples)
        vars(sized).update(vars(self))
        for batch in iter(sized):
            vars(self).update(vars(sized))
            yield batch
        vars(self).update(vars(sized))


def _sample(index: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(index))


def _loader(kind: str, num_samples: int) -> Any:
    if kind in ("stateful", "unsized"):
        return _Batches(num_samples) if kind == "stateful" else _Unsized(num_samples)
    generator = torch.Generator().manual_seed(11) if kind == "generator" else None
    samples = [_sample(index) for index in range(num_samples)]
    return DataLoader(samples, BATCH, shuffle=True, generator=generator)


class _Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean.clone()


class _Events:
    """Names of events, and what happens at one of them."""

    def __init__(self, at: tuple[str, int] = ("", 0), act: Callable[[], None] = int) -> None:
        self.at, self.act = at, act
        self.counts: dict[str, int] = {}

    def __call__(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.at == (name, self.counts[name]):
            self.act()


class _Module(pl.LightningModule):
    """Draws random numbers everywhere, and records what it has done."""

    def __init__(self, events: _Events) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), _Mean(), nn.Dropout(0.3), nn.Linear(4, 1))
        self.events = events
        self.trace: list[tuple[Any, ...]] = []

    def _record(self, *entry: Any) -> None:
        if not self.trainer.sanity_checking:
            self.events(entry[0])
            self.trace.append((*entry, self.current_epoch, self.global_step))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(batch)
        weight = random.random() + float(np.random.rand())
        loss = output.square().mean() + weight * output.mean()
        self._record("train", batch_idx, batch.sum().item(), loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events("update")

    def on_train_batch_end(self, *_: Any) -> None:
        self.events("batch end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.net(batch).square().mean() + torch.rand(())
        self._record("validate", batch_idx, loss.item())
        self.log("loss", loss)

    def on_train_epoch_start(self) -> None:
        self._record("start of epoch", torch.rand(()).item())

    def on_train_epoch_end(self) -> None:
        self._record("end of epoch", torch.rand(()).item())

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # makes the loaders before a restore
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def _fit(
    settings: Fit, folder: Path, events: _Events, *callbacks: pl.Callback, path: str | None = None
) -> tuple[pl.Trainer, _Module]:
    pl.seed_everything(5, verbose=False)
    module = _Module(events)
    fitted = trainer(
        MegatronStrategy(),
        default_root_dir=folder,
        callbacks=list(callbacks),
        max_epochs=settings.epochs,
        max_steps=settings.max_steps,
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.interval,
        check_val_every_n_epoch=settings.every_n_epochs,
        limit_train_batches=settings.limit,
        enable_checkpointing=bool(callbacks),
    )
    samples = DataLoader([_sample(100 + index) for index in range(4)], BATCH)
    with suppress(SystemExit, _Fault):
        fitted.fit(module, _loader(settings.loader, settings.num_samples), samples, ckpt_path=path)
    return fitted, module


@cache
def _uninterrupted(settings: Fit) -> tuple[list[Any], list[Any]]:
    fitted, module = _fit(settings, Path(), _Events())
    return module.trace, _end(fitted, module)


def _end(fitted: pl.Trainer, module: _Module) -> list[Any]:
    state = [tensor.tolist() for tensor in module.state_dict().values()]
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return [state, drawn, fitted.global_step, fitted.current_epoch]


def _assert_rest(settings: Fit, fitted: pl.Trainer, module: _Module, begin: int) -> None:
    """Check that a fit did what the uninterrupted one did from an entry of its record on."""
    trace, end = _uninterrupted(settings)
    assert module.trace == trace[begin:]
    assert _end(fitted, module) == end


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


STOPS = {
    # A validation is due behind the stop: inside of an epoch, at its end, without a step left, and
    # in the middle of an accumulation.
    "validation inside": (Fit(interval=2), ("update", 2), "signal"),
    "validation at the end": (Fit("generator"), ("update", 5), "signal"),
    "validation by batches": (Fit(interval=3, every_n_epochs=None), ("update", 6), "signal"),
    "no step left": (Fit(max_steps=4, interval=2), ("update", 4), "signal"),
    "inside of a validation": (Fit("stateful", interval=2), ("validate", 4), "signal"),
    # The last batch of an epoch whose validations lie inside.
    "end of epoch": (Fit(interval=3), ("update", 5), "signal"),
    "end of epoch, own order": (Fit("generator", interval=3), ("update", 5), "signal"),
    "end of epoch, own state": (Fit("stateful", interval=3), ("batch end", 5), "error"),
    "end of epoch, limited": (Fit("generator", limit=3, interval=2), ("update", 3), "signal"),
    # Inside of an accumulation, and at other places without an update.
    "accumulation": (Fit(accumulate=2), ("batch end", 3), "Ctrl-C"),
    "accumulation, own state": (Fit("stateful", accumulate=3, interval=2), ("train", 3), "error"),
    "accumulation, no length": (Fit("unsized", accumulate=2), ("train", 4), "error"),
    "next epoch": (Fit("stateful", accumulate=2), ("train", 6), "Ctrl-C"),
    "end of the last epoch": (Fit("unsized"), ("end of epoch", 2), "error"),
    "start of an epoch": (Fit("generator", accumulate=2), ("start of epoch", 2), "error"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_fit_equals_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    """Also after a second stop, at the next event of the same kind."""
    settings, at, kind = STOPS[name]
    act = {
        "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "error": _raise(_Fault("on purpose")),
        "Ctrl-C": _raise(KeyboardInterrupt()),
    }[kind]
    trace, _ = _uninterrupted(settings)
    reached, path = 0, None
    for events in (_Events(at, act), _Events((at[0], 1), act)):
        _, stopped = _fit(settings, tmp_path, events, RescueCheckpoint(tmp_path), path=path)
        begin = trace.index(stopped.trace[0]) if stopped.trace else reached
        assert stopped.trace == trace[begin : begin + len(stopped.trace)] and begin <= reached
        reached, path = max(reached, begin + len(stopped.trace)), "last"
    # The checkpoint of a validation comes behind the repeated validation, too.
    best = ModelCheckpoint(tmp_path / "best", "{step}", monitor="loss", save_top_k=-1)
    callbacks = (RescueCheckpoint(tmp_path), best)
    fitted, module = _fit(settings, tmp_path, _Events(), *callbacks, path="last")
    begin = len(trace) - len(module.trace)
    assert begin <= reached
    _assert_rest(settings, fitted, module, begin)
    steps = {entry[-1] for entry in module.trace if entry[0] == "validate"} - {0}
    assert {f"step={step}.ckpt" for step in steps} == {Path(p).name for p in best.best_k_models}


@pytest.mark.parametrize("loader", ["shuffled", "generator", "stateful", "unsized"])
def test_a_save_behind_a_fit_knows_the_position_in_the_data(loader: str, tmp_path: Path) -> None:
    """Loaders have no state any more, and the fit has ended inside of an epoch, between two
    epochs, or with half a step."""
    settings = Fit(loader, accumulate=2, interval=2)
    trace, _ = _uninterrupted(settings)
    for max_steps in (1, 3):
        first, _ = _fit(
            Fit(loader, accumulate=2, interval=2, max_steps=max_steps), tmp_path, _Events()
        )
        path = str(tmp_path / f"{max_steps}.ckpt")
        first.save_checkpoint(path)
        fitted, module = _fit(settings, tmp_path, _Events(), path=path)
        begin = next(
            i for i, entry in enumerate(trace) if entry[0] == "train" and entry[-1] == max_steps
        )
        _assert_rest(settings, fitted, module, begin - (max_steps == 3))


class _SavesEachBatch(pl.Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}-{batch_idx}")


def test_a_save_inside_of_an_accumulation_resumes_at_the_last_update(tmp_path: Path) -> None:
    settings = Fit("stateful", accumulate=2)
    _fit(settings, tmp_path, _Events(), _SavesEachBatch())
    # At the start of the fit, at the second batch, and at the start of the second epoch.
    for name, begin in (("0-0", 0), ("0-2", 3), ("1-0", 9)):
        fitted, module = _fit(settings, tmp_path, _Events(), path=f"{tmp_path}/{name}")
        _assert_rest(settings, fitted, module, begin)


class _WithoutLoops(pl.Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"]


def test_a_checkpoint_without_loops_counts_steps_anew(tmp_path: Path) -> None:
    """Weights, optimizer and position in the data go on."""
    first, _ = _fit(Fit("stateful", max_steps=3), tmp_path, _Events(), _WithoutLoops())
    first.save_checkpoint(tmp_path / "a.ckpt")
    fitted, module = _fit(
        Fit("stateful", max_steps=2), tmp_path, _Events(), path=f"{tmp_path}/a.ckpt"
    )
    assert fitted.global_step == 2 and len(module.trace) == 4


class _LoopStates(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert loop_state(trainer.fit_loop) == trainer.fit_loop.state_dict()


def test_the_state_of_loops_is_lightnings(tmp_path: Path) -> None:
    fitted, _ = _fit(Fit(), tmp_path, _Events(), _LoopStates())
    assert fitted.global_step == 10


class _Numbers(pl.Callback):
    """Losses and validations, and an end in a batch."""

    def __init__(self, fails_at: int | None = None, rank: int | None = None) -> None:
        self.fails_at, self.rank = fails_at, rank
        self.seen: list[Any] = []
        self.num_batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.num_batches += 1
        self.seen.append((trainer.global_step, float(outputs["loss"])))
        if self.num_batches == self.fails_at:
            if self.rank is None:
                raise _Fault("on purpose")
            if self.rank == trainer.global_rank:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        self.seen.append((trainer.global_step, "validated", loss))


def _stopped_twice(layout: Layout, folder: str) -> list[Any]:
    def fit(numbers: _Numbers, path: str | None = None) -> list[Any]:
        fitted = layout.trainer(
            folder,
            max_epochs=2,
            enable_checkpointing=True,
            accumulate_grad_batches=2,
            val_check_interval=2,
            callbacks=[numbers, RescueCheckpoint(folder)],
        )
        with (
            suppress(SystemExit, _Fault),
            # It would end the ranks of this test.
            mock.patch.object(FailureWatch, "report", return_value=False),
            mock.patch.object(compat, "abort_process_groups"),
        ):
            fitted.fit(ToyModule(mask=True), datamodule=layout.data_module(), ckpt_path=path)
        return numbers.seen

    whole = fit(_Numbers())
    # A signal to the last rank at a step with a validation, then an error in half a step.
    first = fit(_Numbers(2, layout.ranks - 1))
    second = fit(_Numbers(1), "last")
    third = fit(_Numbers(), "last")
    return [first == whole[:2], second == whole[2:4], third == whole[3:], len(whole)]


@pytest.mark.spread(1)
@layouts(PP2, DP2)
def test_ranks_resume_at_the_last_update(layout: Layout, tmp_path: Path) -> None:
    assert run(layout, _stopped_twice, tmp_path) == [[True, True, True, 12]] * layout.ranks
