"""States of torchmetrics: lists that only the last stage fills; persistent ones, which are saved
with one replica only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from megatron_lightning.errors import CheckpointError
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DP2,
    ONE,
    PP2,
    TP2_TOY,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)
from tests.lightning.training import test_context_parallel as context

# One micro-batch: the mean of a step is then the same under every layout.
STAGES = make_layout("pp2-dp2", 4, 2, pipeline_model_parallel_size=2, micro_batch_size=4)


class _Listed(Metric):
    """Lists with and without a reduction."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("sums", [], dist_reduce_fx=None)

    def update(self, ids: Tensor) -> None:
        self.rows.append(ids)
        self.sums.append(ids.sum())

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return torch.tensor([len(rows), rows.square().sum(), torch.stack(self.sums).sum()])


class _Module(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen = _Listed()
        self.values: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.seen.update(batch["ids"])  # only the last stage comes here
        return output

    def on_train_epoch_end(self) -> None:
        self.values = self.seen.compute().tolist()


def _fit(layout: Layout, folder: str) -> list[float]:
    module = _Module()
    layout.trainer(folder, max_epochs=1).fit(module, datamodule=layout.data_module(num_samples=32))
    return module.values


@pytest.mark.slow
def test_lists_that_only_the_last_stage_fills(tmp_path: Path) -> None:
    """torchmetrics gathers them entry by entry, on every rank: stages that ask less often would
    wait forever."""
    expected = single(_fit)
    for values in run(STAGES, _fit, tmp_path):
        assert_close(values, expected, 1e-6)


def _saved_and_loaded(layout: Layout, folder: str) -> None:
    """Save with one replica; with two, both are refused, and a run that will save before it
    trains."""
    module, path = _Module(), f"{folder}/middle.ckpt"
    module.seen.persistent(True)
    data = layout.data_module(num_samples=32)
    if layout.ranks == 1:
        trainer = layout.trainer(folder, max_epochs=1)
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(path)
        return
    message = (
        r"seen is a _Listed with persistent states \(rows, sums\).*2 data-parallel "
        r"ranks.*persistent\(False\)"
    )
    trainer = layout.trainer(folder, max_epochs=1)
    trainer.fit(module, datamodule=data)
    with pytest.raises(CheckpointError, match=message):
        trainer.save_checkpoint(f"{folder}/other.ckpt")
    with pytest.raises(CheckpointError, match=message):
        layout.trainer(folder, max_epochs=2, enable_checkpointing=True).fit(module, datamodule=data)
    with pytest.raises(CheckpointError, match=message):
        layout.trainer(folder, max_epochs=2).fit(module, datamodule=data, ckpt_path=path)


def test_persistent_states_are_refused_with_several_replicas(tmp_path: Path) -> None:
    run(ONE, _saved_and_loaded, tmp_path)
    run(DP2, _saved_and_loaded, tmp_path)


class _Sum(Metric):
    """Sum over all samples: a state that is counted twice is seen."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total += value.sum()

    def compute(self) -> Tensor:
        return self.total


class _Scores:
    """Plain object of a user's."""

    def __init__(self) -> None:
        self.of = {"ids": _Sum()}


class _Counter(pl.Callback):
    """Metrics that hooks update, with the whole batch; one is made when a validation begins."""

    def __init__(self) -> None:
        self.seen = _Sum()
        self.late: list[Metric] = []
        self.values: dict[str, float] = {}

    def on_validation_epoch_start(self, *_: Any) -> None:
        self.late = [_Sum()]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen.update(batch["ids"])
        self.late[0].update(batch["ids"])

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        local = _Sum()
        local.update(torch.ones(()))
        metrics = {
            "seen": self.seen,
            "late": self.late[0],
            "in-dict": module.scores["a"]["ids"],
            "in-list": module.listed[1],
            "in-object": module.kept.of["ids"],
            "fresh": module.fresh,
        }
        # Under a pipeline a collective of all stages.
        self.values = {name: float(metric.compute()) for name, metric in metrics.items()}
        self.values["local"] = float(local.compute())


class _Hidden(ToyModule):
    """Metrics that are no attributes, updated in steps."""

    sequence_dims = {"ids": 1, "tgt": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.scores = {"a": {"ids": _Sum()}}
        self.listed = [None, _Sum()]
        self.kept = _Scores()

    def on_validation_start(self) -> None:
        self.fresh = _Sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        for metric in (
            self.scores["a"]["ids"],
            self.listed[1],
            self.kept.of["ids"],
            self.fresh,
        ):
            metric.update(batch["ids"])
        return loss


def _hidden(layout: Layout, folder: str) -> dict[str, float]:
    counter = _Counter()
    trainer = layout.trainer(folder, callbacks=[counter])
    trainer.validate(_Hidden(), layout.data_module(), verbose=False)
    assert counter.seen.dist_sync_fn is None  # as before the run
    return counter.values


@pytest.mark.spread(1)
@layouts(DP2, TP2_TOY, STAGES, slow=[PP2])
def test_metrics_that_are_no_attributes(layout: Layout, tmp_path: Path) -> None:
    expected = single(_hidden)
    for values in run(layout, _hidden, tmp_path):
        assert_close(values, {**expected, "local": float(layout.data)})


def _of_parts(layout: Layout, folder: str) -> list[float]:
    module, counter = context.Module(), _TokenCounter()
    trainer = layout.trainer(folder, callbacks=[counter])
    trainer.validate(counter.watched(module), context._loader(), verbose=False)
    return counter.values


class _TokenCounter(pl.Callback):
    """One metric that a hook updates with whole sequences, and one that the step does."""

    def __init__(self) -> None:
        self.in_hook, self.values = _Sum(), list[float]()
        self.in_step = {"tokens": _Sum()}

    def watched(self, module: Any) -> Any:
        module.tokens = self.in_step
        step = module.validation_step

        def validation_step(batch: Any, batch_idx: int) -> None:
            step(batch, batch_idx)
            module.tokens["tokens"].update(batch[0])

        module.validation_step = validation_step
        return module

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.in_hook.update(batch[0])

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.values = [float(self.in_hook.compute()), float(self.in_step["tokens"].compute())]


@layouts(context.CP2)
def test_metrics_of_whole_sequences_and_of_parts(layout: Layout, tmp_path: Path) -> None:
    """On context-parallel ranks a hook sees whole sequences, and a step a part of each."""
    expected = single(_of_parts)
    assert expected[0] == expected[1]
    for values in run(layout, _of_parts, tmp_path):
        assert_close(values, expected)
