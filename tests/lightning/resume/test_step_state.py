"""Values that steps leave on the LightningModule: every rank has one device's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning.support import (
    PP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import Net, VectorModule, loader, vectors

PP2_VPP2 = make_layout(
    "pp2-vpp2",
    2,
    1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)


class _Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count


class _Counters(VectorModule):
    """Counts in its steps what its hooks read, and learns at a rate that follows from it."""

    seen_ids: list[int] = []  # noqa: RUF012 (of the class, as users write it)

    def __init__(self) -> None:
        super().__init__(Net(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))))
        self.samples = 0
        self.correct = torch.zeros((), dtype=torch.int64)
        self.confusion = torch.zeros(8, 8)
        self.by_class: dict[int, dict[str, float]] = {}
        self.losses = _Meter()
        self.history: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.samples += len(batch[0])  # before the call: on every stage
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.update(float(loss), len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        scores = self.net(batch[0])
        found = scores.argmax(1)
        self.correct += (found == batch[1]).sum()
        for truth, guess in zip(batch[1].tolist(), found.tolist(), strict=True):
            self.confusion[truth, guess] += 1
            row = self.by_class.setdefault(truth, {"n": 0, "loss": 0.0})
            row["n"] += 1
        for truth, loss in zip(
            batch[1].tolist(), F.cross_entropy(scores, batch[1], reduction="none"), strict=True
        ):
            self.by_class[truth]["loss"] += float(loss)
        self.seen_ids.extend(found.tolist())

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.correct / 16)
        self.log("train_loss", self.losses.sum / self.losses.count)
        self.history.append(
            {
                "correct": int(self.correct),
                "confusion": self.confusion.tolist(),
                "classes": {key: dict(value) for key, value in sorted(self.by_class.items())},
                "samples": self.samples,
                "ids": list(self.seen_ids),
            }
        )
        self.correct = torch.zeros((), dtype=torch.int64)
        self.confusion = torch.zeros(8, 8)
        self.by_class = {}
        self.losses = _Meter()
        self.seen_ids.clear()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores: Tensor = self.net(batch[0])
        self.correct += (scores.argmax(1) == batch[1]).sum()
        self.confusion = self.confusion + scores.sum(0)
        return scores

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5, threshold=0.1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "accuracy"},
        }


def _counted(layout: Layout, folder: str) -> dict[str, Any]:
    module = _Counters()
    fit = layout.trainer(folder, max_epochs=3)
    fit.fit(module, loader(layout), loader(layout, vectors(16, 1)))
    rate = fit.optimizers[0].param_groups[0]["lr"]
    fit.predict(module, loader(layout, vectors(16, 2)))
    predicted = {"correct": int(module.correct), "scores": module.confusion[0].tolist()}
    return {
        "history": module.history,
        "metrics": metrics_of(fit),
        "rate": rate,
        "predicted": predicted,
    }


@pytest.mark.slow
@layouts(PP2, PP2_VPP2)
def test_counters_and_containers_are_those_of_one_device(layout: Layout, tmp_path: Path) -> None:
    expected = single(_counted)
    assert 0 < expected["rate"] < 0.5, "a metric of counters moves the rate"
    for rank in run(layout, _counted, tmp_path):
        assert_close(rank, expected)


@layouts(slow=[PP2_DP2])
def test_replicas_count_their_own_samples(layout: Layout, tmp_path: Path) -> None:
    ranks = run(layout, _counted, tmp_path)
    assert ranks[0]["history"][0]["samples"] == 16
    for pair in ((0, 2), (1, 3)):
        assert_close(ranks[pair[1]]["history"], ranks[pair[0]]["history"])


class _Odd(VectorModule):
    """Keeps an object of a class of its own."""

    last: Any = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = _Meter()
        return loss


def _odd(layout: Layout, folder: str) -> list[str]:
    fit = layout.trainer(folder, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(_Odd(), loader(layout))
    return [str(entry.message) for entry in caught if "self.last" in str(entry.message)]


def test_an_object_that_stays_on_one_stage_is_named_once(tmp_path: Path) -> None:
    [first, other] = run(PP2, _odd, tmp_path)
    assert len(first) == 1 and not other
    assert "training_step changes self.last, and only the last pipeline stage has" in first[0]
