"""Hints about BatchNorm over parts of a batch and about labels without ``num_items``: each once,
and only where the parts differ from the batch."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

SPECTRAL: dict[str, Any] = {
    "parametrized": torch.nn.utils.parametrizations.spectral_norm,
    "hooked": torch.nn.utils.spectral_norm,
}


class Tagger(pl.LightningModule):
    """Labels every position; ``counts`` says whether it returns the number of labels."""

    def __init__(self, norm: str, counts: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(6) if norm in {"trained", "frozen"} else nn.Identity()
        )
        if norm in SPECTRAL:
            SPECTRAL[norm](self.net[0])
        self.counts = counts

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch.pop("labels")  # as models of transformers do
        loss = F.cross_entropy(self.net(batch["x"]).flatten(0, 1), labels.flatten())
        return {"loss": loss, "num_items": (labels != -100).sum()} if self.counts else loss

    def on_train_epoch_start(self) -> None:
        if isinstance(self.net[1], nn.BatchNorm1d) and not self.net[1].weight.requires_grad:
            self.net[1].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _hints(
    ignored: list[int], micro_batch_size: int | None, norm: str = "", counts: bool = False
) -> list[str]:
    """Return the hints of two epochs over rows of 6 labels, of which ``ignored`` are -100."""
    rows: Any = [{"x": torch.randn(6, 3), "labels": torch.randint(0, 4, (6,))} for _ in ignored]
    for row, number in zip(rows, ignored, strict=True):
        row["labels"][:number] = -100
    module = Tagger(norm, counts)
    if norm == "frozen":
        module.net[1].requires_grad_(False)
    said: list[str] = []
    size = 4 if not torch.distributed.is_initialized() else 2
    with patch("megatron_lightning.step.judge.rank_zero_warn", said.append):
        fit = trainer(MegatronStrategy(micro_batch_size=micro_batch_size), max_epochs=2)
        fit.fit(module, DataLoader(rows, batch_size=size))  # type: ignore[arg-type]
    return said


def test_micro_batches_with_different_numbers_of_labels() -> None:
    [hint] = _hints([1, 2, 0, 0] * 2, micro_batch_size=2)
    assert "ranks of the first batch have 9 to 12 others" in hint
    assert "num_items(batch)" in hint


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ignored", "micro", "counts"),
    [
        ([1, 2, 0, 0], 2, True),
        ([1, 2, 0, 0], None, False),
        ([1] * 4, 2, False),
        ([0] * 4, 1, False),
    ],
    ids=["counted", "one part", "equal", "none ignored"],
)
def test_no_hint_where_nothing_differs(ignored: list[int], micro: int, counts: bool) -> None:
    assert _hints(ignored, micro, counts=counts) == []


def test_a_data_parallel_rank_without_ignored_labels_counts_too() -> None:
    first, second = run_ranks(2, _hints, [3, 0, 3, 0], None)  # rank 1 has the rows without
    assert first == second
    assert ["ranks of the first batch have 6 to 12 others" in hint for hint in first] == [True]


def test_batch_norm_over_parts_of_a_batch() -> None:
    [hint] = _hints([0] * 8, 2, norm="trained")
    assert "net.1 is a BatchNorm" in hint
    assert "2 parts of a batch (2 micro-batch(es) on 1 data-parallel rank(s))" in hint
    assert _hints([0] * 4, None, norm="trained") == _hints([0] * 4, 2, norm="frozen") == []


@pytest.mark.parametrize("norm", ["parametrized", "hooked"])
def test_spectral_norm_in_micro_batches(norm: str) -> None:
    [hint] = _hints([0] * 8, 2, norm=norm)
    assert "net.0 has a spectral_norm" in hint
    assert "2 a batch" in hint
    assert _hints([0] * 4, None, norm=norm) == []
