"""Data-parallel ranks with different numbers of batches: evaluation is as if nothing had been
added; training is refused before its first batch, or where data without a length end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import tiny_config
from tests.helpers.toy import ToyModule, samples
from tests.lightning.support import (
    DDP2,
    DP2,
    PP2_DP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    thinned,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
FSDP2_MICRO = make_layout("fsdp2-micro", 2, 2, data_parallel="fsdp", micro_batch_size=2)
FSDP2_PP2 = make_layout(
    "fsdp2-pp2", 4, 2, data_parallel="fsdp", pipeline_model_parallel_size=2, micro_batch_size=2
)
DP2_MICRO = make_layout("dp2-micro", 2, 2, micro_batch_size=2)
EP2 = make_layout("ep2", 2, 2, expert_model_parallel_size=2)
CONFIG = tiny_config(
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=30,
    max_sequence_length=8,
    moe=MoEConfig(num_experts=4),
)


class _Recording(pl.LightningModule):
    """Keeps all kinds of values that a step changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[str, list[Any]] = {"losses": [], "ends": []}
        self.count = 0
        self.summed = SumMetric()
        self.listed = [SumMetric()]
        self.found: dict[str, float] = {}

    def _keep(self, loss: Tensor) -> None:
        self.seen["losses"].append(float(loss))
        self.count += 1
        self.summed.update(loss)
        self.listed[0].update(loss)
        self.log("summed", self.summed, on_step=False, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.seen["ends"].append(batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.found = {"listed": float(self.listed[0].compute()), "draw": float(torch.rand(()))}


class _Toy(_Recording, ToyModule):
    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["ids"]))
        self._keep(loss)
        batch.clear()  # as batch.pop("labels") does
        return loss


class _Experts(_Recording, GPTLightningModule):
    def __init__(self) -> None:
        super().__init__(CONFIG)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        output = super().validation_step(batch, batch_idx)
        self._keep(torch.as_tensor(self.trainer.callback_metrics.get("val_loss", 1.0)))
        return output


def _rows(kind: str, number: int, seed: int) -> list[dict[str, Tensor]]:
    if kind == "toy":
        return samples(number, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 30, (number, 9), generator=generator)
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def _validated(layout: Layout, folder: str, kind: str) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    rank = dist.get_rank() % layout.data  # pipeline ranks are the slowest axis
    module = _Toy() if kind == "toy" else _Experts()
    trainer = layout.trainer(folder, use_distributed_sampler=False)
    numbers = ((3, 2), (1, 2))[rank] if kind == "toy" else ((3,), (1,))[rank]
    loaders = [
        DataLoader(_rows(kind, number * 2, 10 * rank + place), batch_size=2)
        for place, number in enumerate(numbers)
    ]
    trainer.validate(module, loaders, verbose=False)
    return {
        "metrics": metrics_of(trainer),
        "seen": module.seen,
        "count": module.count,
        **module.found,
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "reference", "kind"),
    [
        pytest.param(FSDP2, DP2, "toy", id="fsdp2"),
        pytest.param(FSDP2_MICRO, DP2_MICRO, "toy", id="fsdp2-micro"),
        pytest.param(EP2, DP2, "experts", id="ep2"),
        pytest.param(FSDP2_PP2, PP2_DP2, "toy", id="fsdp2-pp2", marks=pytest.mark.slow),
    ],
)
def test_nothing_comes_of_batches_that_were_added(
    layout: Layout, reference: Layout, kind: str, tmp_path: Path
) -> None:
    """With ``zero1`` no batch is added. 1e-5: sums in another order."""
    ranks = run(layout, _validated, tmp_path, kind)
    assert_close(ranks, run(reference, _validated, tmp_path, kind))
    counts = [5, 3] if kind == "toy" else [3, 1]
    assert [rank["count"] for rank in ranks] == counts * (layout.ranks // layout.data)


def _fitted(layout: Layout, folder: str) -> dict[str, Any]:
    """Validate before and during a fit, by loaders that are read side by side, and test."""
    pl.seed_everything(3, verbose=False)
    rank, module = dist.get_rank(), _Sides()
    trainer = layout.trainer(
        folder, max_epochs=2, num_sanity_val_steps=-1, use_distributed_sampler=False
    )
    trainer.fit(module, layout.data_module(num_samples=16).train_dataloader(), _sides(rank))
    during = metrics_of(trainer)
    trainer.test(module, _sides(rank), verbose=False)
    return {"during": during, "tested": metrics_of(trainer), "seen": module.seen["losses"]}


class _Sides(_Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().validation_step(batch["long"], batch_idx)

    test_step = validation_step


def _sides(rank: int) -> CombinedLoader:
    loaders = {
        name: DataLoader(samples(2 * number, rank + number), batch_size=2)
        for name, number in (("long", 3 - rank), ("short", 1))
    }
    return CombinedLoader(loaders, "max_size_cycle")


@pytest.mark.slow
def test_validation_during_a_fit_with_loaders_side_by_side(tmp_path: Path) -> None:
    """1e-5: training sums gradients in another order."""
    expected, found = (run(layout, _fitted, tmp_path) for layout in (DP2, FSDP2))
    assert_close(found, expected)


def _predicted(layout: Layout, folder: str) -> list[Any]:
    module, trainer = ToyModule(), layout.trainer(folder)
    return trainer.predict(module, DataLoader(samples(5, 4), batch_size=1))


@pytest.mark.slow
def test_predictions_of_a_number_of_samples_that_ranks_cannot_share(tmp_path: Path) -> None:
    expected = run(DP2, _predicted, tmp_path)
    found = run(FSDP2, _predicted, tmp_path)
    assert [len(rank) for rank in found] == [3, 2]
    for ours, others in zip(found, expected, strict=True):
        assert_close(ours, others)


class _Stream(IterableDataset[Any]):
    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed

    def __iter__(self) -> Iterator[Any]:
        yield from samples(self.number, self.seed)


def _sized(numbers: tuple[int, int], rank: int) -> DataLoader[Any]:
    return DataLoader(samples(2 * numbers[rank], 1), batch_size=2)


def _stream(numbers: tuple[int, int], rank: int) -> DataLoader[Any]:
    return DataLoader(_Stream(2 * numbers[rank], rank), batch_size=2)


def _plain(numbers: tuple[int, int], rank: int) -> Any:
    return map(torch.utils.data.default_collate, [samples(2, 1)] * numbers[rank])


def _mixed(numbers: tuple[int, int], rank: int) -> DataLoader[Any]:
    return (_sized, _stream)[rank](numbers, rank)


class _Logging(ToyModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("val_loss", loss, on_step=True, sync_dist=True)
        return loss


def _refused(
    layout: Layout, folder: str, fn: str, make: Any, numbers: tuple[int, int], module: Any
) -> tuple[str, int]:
    rank = dist.get_rank() % layout.data  # pipeline ranks are the slowest axis
    trainer = layout.trainer(folder, max_epochs=2, use_distributed_sampler=False)
    with pytest.raises(ConfigError) as caught:
        getattr(trainer, fn)(module(), make(numbers, rank))
    return str(caught.value), trainer.global_step


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "fn", "make", "numbers", "module", "message"),
    thinned(
        [
            (DP2, "fit", _sized, (3, 2), ToyModule, "training batches (rank 0: 3, rank 1: 2)"),
            (DDP2, "fit", _sized, (1, 2), ToyModule, "Trainer(limit_train_batches=1)"),
            (
                DDP2,
                "fit",
                _sized,
                (1, 0),
                ToyModule,
                "no batch on some ranks (rank 0: 1, rank 1: 0)",
            ),
            (DP2, "fit", _mixed, (2, 2), ToyModule, "(rank 0: 2, rank 1: no length)"),
            (
                DP2,
                "fit",
                _stream,
                (3, 2),
                ToyModule,
                "data ended on some ranks only (rank 0: more",
            ),
            (DP2, "fit", _plain, (2, 4), ToyModule, "(rank 0: 2 batches, rank 1: more)"),
            (FSDP2, "validate", _stream, (1, 2), ToyModule, "limit_val_batches=1"),
            (FSDP2, "predict", _sized, (0, 2), ToyModule, "predict DataLoader has no batch"),
            (DP2, "validate", _sized, (2, 0), ToyModule, "validate DataLoader has no batch"),
            (DP2, "predict", _sized, (0, 1), ToyModule, "on some ranks (rank 0: 0, rank 1: 1)"),
            (DP2, "test", _stream, (2, 0), ToyModule, "(rank 0: more, rank 1: 0 batches)"),
            (DP2, "validate", _sized, (3, 2), _Logging, "(rank 0: 3, rank 1: 2)"),
            (DP2, "validate", _stream, (3, 2), _Logging, "(rank 0: more, rank 1: 2 batches)"),
        ]
    ),
)
def test_what_is_refused(
    layout: Layout,
    fn: str,
    make: Any,
    numbers: tuple[int, int],
    module: Any,
    message: str,
    tmp_path: Path,
) -> None:
    for text, steps in run(layout, _refused, tmp_path, fn, make, numbers, module):
        assert message in text
        if make is _sized:
            assert steps == 0


def _refused_in_fit(layout: Layout, folder: str, make: Any) -> str:
    trainer = layout.trainer(folder, max_epochs=1, use_distributed_sampler=False)
    rank = dist.get_rank()
    with pytest.raises(ConfigError) as caught:
        trainer.fit(ToyModule(), _sized((2, 2), rank), make((2, 0), rank))
    return str(caught.value)


@pytest.mark.parametrize("make", [_sized, _stream])
def test_a_rank_without_a_batch_is_refused_during_a_fit(make: Any, tmp_path: Path) -> None:
    for text in run(DP2, _refused_in_fit, tmp_path, make):
        assert "rank 1: 0" in text


def _streamed(layout: Layout, folder: str) -> int:
    rank, module = dist.get_rank(), _Toy()
    trainer = layout.trainer(folder, use_distributed_sampler=False)
    trainer.validate(module, _stream((4, 2), rank), verbose=False)
    return module.count


def test_ranks_evaluate_what_they_have(tmp_path: Path) -> None:
    """Without a length, and without collectives in a step."""
    assert run(DP2, _streamed, tmp_path) == [4, 2]


def _trained(layout: Layout, folder: str, make: Any, numbers: tuple[int, int]) -> list[Any]:
    rank = dist.get_rank() % layout.data  # pipeline ranks are the slowest axis
    limit = {"limit_train_batches": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    trainer = layout.trainer(folder, max_epochs=2, reload_dataloaders_every_n_epochs=1, **limit)
    module = ToyModule()
    trainer.fit(module, make(numbers, rank), _sized((1, 2), rank))
    return [trainer.global_step, type(trainer.train_dataloader).__name__]


@pytest.mark.spread(1)
@layouts(DP2, slow=[PP2_DP2])
@pytest.mark.parametrize("make", [_sized, _stream])
def test_equal_numbers_after_limits_are_trained(layout: Layout, make: Any, tmp_path: Path) -> None:
    assert run(layout, _trained, tmp_path, make, (3, 2)) == [[4, "DataLoader"]] * layout.ranks
