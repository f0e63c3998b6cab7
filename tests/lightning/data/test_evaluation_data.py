"""Data split among several replicas: every sample once, in the order of the user's sampler, however
that draws it.

For training see ``test_resume.py``; here are the batch samplers that do not resume.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies.step.loaders import dataloaders
from tests.helpers.toy import ToyModule, samples
from tests.lightning.support import DP2, Layout, assert_close, layouts, run, single

DATA = [{**sample, "id": torch.tensor(index)} for index, sample in enumerate(samples(24, 2))]


class _Endless(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(len(DATA)))


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sequential": lambda size: DataLoader(DATA, batch_size=size),
    "shuffled": lambda size: DataLoader(DATA, batch_size=size, shuffle=True),
    "weighted": lambda size: DataLoader(
        DATA,
        batch_size=size,
        sampler=WeightedRandomSampler([1.0 + i for i in range(24)], 16, replacement=False),
    ),
    "generator": lambda size: DataLoader(
        DATA,
        batch_size=size,
        sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(4)),
    ),
    "batch-sampler": lambda size: DataLoader(
        DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), size, drop_last=False)
    ),
}


class _Seeing(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[list[int]]] = {"validation": [], "predict": []}

    def setup(self, stage: str) -> None:
        if self.global_rank:
            torch.manual_seed(77)  # as after training: replicas have random numbers of their own

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen["validation"].append(batch["id"].tolist())
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen["predict"].append(batch["id"].tolist())
        return batch["id"] + 0 * super().predict_step(batch, batch_idx)[:, 0]


def _evaluated(layout: Layout, folder: str, kind: str) -> dict[str, Any]:
    pl.seed_everything(9, verbose=False)
    module, trainer = _Seeing(), layout.trainer(folder)
    loader = LOADERS[kind](4 // layout.data)
    metrics = trainer.validate(module, loader, verbose=False)
    trainer.predict(module, loader)
    return {"seen": module.seen, "metrics": metrics}


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", LOADERS)
@layouts(DP2)
def test_every_sample_is_seen_once(layout: Layout, kind: str, tmp_path: Path) -> None:
    expected = single(_evaluated, kind)
    ranks = run(layout, _evaluated, tmp_path, kind)
    for stage, batches in expected["seen"].items():
        together = zip(*(rank["seen"][stage] for rank in ranks if rank["seen"][stage]), strict=True)
        assert [set().union(*ids) for ids in together] == [set(ids) for ids in batches], stage
    for rank in ranks:
        assert_close(rank["metrics"], expected["metrics"])


def _odd(layout: Layout, folder: str) -> list[Any]:
    """Validations of 7 samples, of 5 one by one, and of 1, each sequential and shuffled."""
    found = []
    for count, size in ((7, 4), (5, 1), (1, 1)):
        for shuffle in (False, True):
            pl.seed_everything(9, verbose=False)
            loader = DataLoader(DATA[:count], batch_size=size, shuffle=shuffle)
            module = _Seeing()
            said: list[str] = []
            with patch(f"{dataloaders.__name__}.rank_zero_warn", said.append):
                metrics = layout.trainer(folder).validate(module, loader, verbose=False)
            found.append((sorted(chain(*module.seen["validation"])), metrics, said))
    return found


@pytest.mark.slow
def test_no_sample_counts_twice(tmp_path: Path) -> None:
    """Means do not depend on the number of ranks, unless a rank would have no batch."""
    expected = single(_odd)
    ranks = run(DP2, _odd, tmp_path)
    for number, (ids, metrics, _) in enumerate(expected):
        of_ranks = [rank[number] for rank in ranks]
        if len(ids) > 1:
            assert sorted(chain(*(own for own, _, _ in of_ranks))) == ids
        for _, own_metrics, _ in of_ranks:
            assert_close(own_metrics, metrics)
    for number in (4, 5):
        assert "1 samples of validation or test are shared by 2" in ranks[0][number][2][0]
    assert not any(said for *_, said in ranks[0][:4])


def _without_length(layout: Layout, folder: str, run_stage: str) -> None:
    with pytest.raises(
        ConfigError, match="_Endless without __len__, which cannot be split among 2"
    ):
        getattr(layout.trainer(folder, max_steps=1), run_stage)(
            _Seeing(), DataLoader(DATA, batch_size=2, sampler=_Endless())
        )


@pytest.mark.parametrize("run_stage", ["validate", "fit"])
def test_a_sampler_without_length_is_refused(run_stage: str, tmp_path: Path) -> None:
    run(DP2, _without_length, tmp_path, run_stage)


class _LastFirst(BatchSampler):
    """Batches of a user's own."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


class _Training(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.seen.append(batch["id"].tolist())
        return super().training_step(batch, batch_idx)


def _own_batches(layout: Layout, folder: str) -> list[list[int]]:
    module = _Training()
    shuffled = RandomSampler(DATA, generator=torch.Generator().manual_seed(4))
    layout.trainer(folder, max_epochs=1).fit(
        module, DataLoader(DATA, batch_sampler=_LastFirst(shuffled, 4, drop_last=False))
    )
    with pytest.raises(TypeError, match=r"into your batch sampler.*use_distributed_sampler=False"):
        layout.trainer(folder, max_epochs=1).fit(
            _Training(), DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])
        )
    return module.seen


@pytest.mark.slow
def test_training_batches_of_the_users_own_are_shared_out(tmp_path: Path) -> None:
    """Or refused as Lightning refuses them; nobody trains on the same samples twice without
    knowing."""
    ranks = run(DP2, _own_batches, tmp_path)
    assert [[len(batch) for batch in batches] for batches in ranks] == [[4, 4, 4]] * 2
    assert sorted(sample for batches in ranks for batch in batches for sample in batch) == list(
        range(24)
    )
