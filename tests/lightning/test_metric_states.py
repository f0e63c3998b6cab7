"""Persistent metrics go on in mid-epoch with any number of replicas: the value is that of never having stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from megatron_lightning.errors import CheckpointError
from tests.helpers.toy import ToyModule
from tests.lightning.support import DDP2, DP2, DP4, ONE, Layout, assert_close, make_layout, run, single

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
# One micro-batch: the mean of a step is then the same under every layout.
STAGES = make_layout("pp2-dp2", 4, 2, pipeline_model_parallel_size=2, micro_batch_size=4)
STEPS, STOP = 4, 2


class _Everything(Metric):
    """Every reduction that can be divided again, over ids, which do not depend on the model."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum", persistent=True)
        self.add_state("mean", torch.zeros(2), dist_reduce_fx="mean", persistent=True)
        self.add_state("low", torch.tensor(10.0), dist_reduce_fx="min", persistent=True)
        self.add_state("high", torch.tensor(-1.0), dist_reduce_fx="max", persistent=True)
        self.add_state("rows", [], dist_reduce_fx="cat", persistent=True)
        self.add_state("means", [], dist_reduce_fx="cat", persistent=True)

    def update(self, ids: Tensor) -> None:
        mean = ids.float().mean()
        self.total += ids.sum()
        self.mean += mean
        self.low, self.high = torch.minimum(self.low, mean), torch.maximum(self.high, mean)
        self.rows.append(ids)
        self.means.append(mean)

    def compute(self) -> Tensor:
        rows, means = (
            torch.cat([torch.atleast_1d(x) for x in s]) if isinstance(s, list) else s for s in (self.rows, self.means)
        )
        counts = [len(rows), rows.square().sum(), means.max()]
        return torch.tensor([self.total, self.mean[0], self.mean[1], self.low, self.high, *counts])


class _Listed(Metric):
    """A list without a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", [], dist_reduce_fx=None, persistent=True)

    def update(self, ids: Tensor) -> None:
        self.sums.append(ids.sum())

    def compute(self) -> Tensor:
        return torch.stack(self.sums).sum()


class _Apart(Metric):
    """Only its own compute can put the replicas together."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx=None, persistent=True)

    def update(self, ids: Tensor) -> None:
        self.total = self.total + ids.sum()

    def compute(self) -> Tensor:
        return self.total.sum()


class _Module(ToyModule):
    late = False

    def __init__(self, *kinds: type[Metric]) -> None:
        super().__init__()
        self.seen = torch.nn.ModuleList(kind() for kind in kinds)
        self.values: list[list[float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if not self.late:
            self._see(batch)
        output = super().training_step(batch, batch_idx)
        if self.late:  # only the last stage comes here
            self._see(batch)
        return output

    def _see(self, batch: dict[str, Tensor]) -> None:
        for metric in self.seen:
            metric.update(batch["ids"])

    def on_train_epoch_end(self) -> None:
        self.values = [metric.compute().view(-1).tolist() for metric in self.seen]


class _Save(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STOP:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/middle.ckpt")


def _fit(layout: Layout, folder: str, kinds: tuple[type[Metric], ...], resume: bool) -> Any:
    """Return the metrics of an epoch during which a checkpoint is saved, or which goes on from that checkpoint."""
    module = _Module(*kinds)
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[] if resume else [_Save()])
    path = f"{folder}/middle.ckpt" if resume else None
    trainer.fit(module, datamodule=layout.data_module(num_samples=8 * STEPS), ckpt_path=path)
    return module.values


def _whole(layout: Layout, folder: str, kinds: tuple[type[Metric], ...]) -> Any:
    return _fit(layout, folder, kinds, False)


def _extremes_are_local(values: list[list[float]]) -> list[list[float]]:
    """Leave out extremes of a step's mean, which are over other batches on each number of replicas."""
    return [[v for i, v in enumerate(row) if i not in (3, 4, 7)] if len(row) > 1 else row for row in values]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(DP2, ONE, id="2-to-1"),
        pytest.param(DDP2, FSDP2, id="ddp-to-fsdp"),
        pytest.param(ONE, STAGES, id="1-to-pp2-dp2"),
        pytest.param(FSDP2, DP2, id="fsdp-to-zero1", marks=pytest.mark.slow),
        pytest.param(STAGES, DP4, id="pp2-dp2-to-4", marks=pytest.mark.slow),
        pytest.param(DP4, STAGES, id="4-to-pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_the_value_is_that_of_never_having_stopped(before: Layout, after: Layout, tmp_path: Path) -> None:
    """Sums, means, extremes and lists, on every rank."""
    kinds = (_Everything, _Listed)
    expected = single(_whole, kinds)
    whole = run(before, _fit, tmp_path, kinds, False)
    resumed = run(after, _fit, tmp_path, kinds, True)
    for values in (*whole, *resumed):
        assert_close(_extremes_are_local(values), _extremes_are_local(expected), 1e-6)
    assert all(rank == resumed[0] for rank in resumed)
    extremes = [whole[0][0][3:5], expected[0][3:5]]
    assert resumed[0][0][3] <= max(e[0] for e in extremes) and resumed[0][0][4] >= min(e[1] for e in extremes)


class _Late(_Module):
    late = True


def _late(layout: Layout, folder: str, resume: bool) -> Any:
    with mock.patch(f"{__name__}._Module", _Late):
        return _fit(layout, folder, (_Everything, _Listed), resume)


@pytest.mark.parametrize("after", [STAGES, pytest.param(ONE, marks=pytest.mark.slow)], ids=["pp2-dp2", "one"])
def test_lists_that_only_the_last_stage_fills(after: Layout, tmp_path: Path) -> None:
    """torchmetrics gathers them entry by entry, on every rank: stages that ask less often would wait forever."""
    expected = single(_whole, (_Everything, _Listed))
    for values in (*run(STAGES, _late, tmp_path, False), *run(after, _late, tmp_path, True)):
        assert_close(_extremes_are_local(values), _extremes_are_local(expected), 1e-6)


def _alone(layout: Layout, folder: str) -> Any:
    with pytest.raises(CheckpointError, match=r"2 data-parallel ranks under the metric state seen\.0\.total"):
        _fit(layout, folder, (_Apart,), True)


def test_states_without_a_known_reduction_need_as_many_replicas(tmp_path: Path) -> None:
    expected = single(_whole, (_Apart,))
    assert run(DP2, _fit, tmp_path, (_Apart,), False) == [expected] * 2
    assert run(DDP2, _fit, tmp_path, (_Apart,), True) == [expected] * 2
    run(ONE, _alone, tmp_path)
