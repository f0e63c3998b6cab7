"""Steps of every form: random masks, own ways to cut a batch, several tensors between stages, the
module itself pipelined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import PipelineOptions
from tests.helpers.toy import SEQUENCE, VOCABULARY, ToyData, ToyModule
from tests.helpers.toy_decoder import HIDDEN
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    PP2_WHOLE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    mean_over_ranks,
    metrics_of,
    run,
    single,
)


def _fit(
    layout: Layout,
    folder: str,
    module: pl.LightningModule,
    data: pl.LightningDataModule | None = None,
) -> dict[str, Any]:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=2, callbacks=[record], gradient_clip_val=0.5)
    trainer.fit(module, datamodule=data or layout.data_module())
    return {"losses": record.losses, "norms": record.norms, "metrics": metrics_of(trainer)}


def _compare(layout: Layout, folder: Path, body: Any, *args: Any) -> None:
    expected, ranks = single(body, *args), run(layout, body, folder, *args)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"])
    for rank in ranks:
        assert_close(rank["norms"], expected["norms"])
        assert_close(rank["metrics"], expected["metrics"])


def _masked(layout: Layout, folder: str) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    return _fit(layout, folder, ToyModule(mask=True))


@pytest.mark.slow
@layouts(PP2, PP2_WHOLE, MICRO)
def test_random_mask_before_the_call(layout: Layout, tmp_path: Path) -> None:
    """Drawn for every micro-batch on every stage, in training and validation: the numbers of one
    device."""
    _compare(layout, tmp_path, _masked)


class _Cut(ToyModule):
    """``shift`` has as many entries as the batch, but by position in the sequence: only its owner
    can know."""

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert batch["shift"].shape == (SEQUENCE,)
        return super()._loss({**batch, "ids": (batch["ids"] + batch["shift"]) % VOCABULARY})


def split_batch(batch: dict[str, Any], micro_batch_size: int) -> list[dict[str, Any]]:
    starts = range(0, len(batch["ids"]), micro_batch_size)
    return [
        {**batch, **{key: batch[key][start : start + micro_batch_size] for key in ("ids", "tgt")}}
        for start in starts
    ]


class _CutBySelf(_Cut):
    def split_batch(self, batch: dict[str, Any], micro_batch_size: int) -> list[dict[str, Any]]:
        return split_batch(batch, micro_batch_size)


class _ShiftData(ToyData):
    def on_before_batch_transfer(
        self, batch: dict[str, Any], dataloader_idx: int
    ) -> dict[str, Any]:
        return {**batch, "shift": torch.arange(SEQUENCE)}


class _ShiftDataCuts(_ShiftData):
    def split_batch(self, batch: dict[str, Any], micro_batch_size: int) -> list[dict[str, Any]]:
        return split_batch(batch, micro_batch_size)


def _cut(layout: Layout, folder: str, owner: str) -> dict[str, Any]:
    data = (_ShiftDataCuts if owner == "data" else _ShiftData)(8 // layout.data, 32)
    return _fit(layout, folder, _Cut() if owner == "data" else _CutBySelf(), data)


@pytest.mark.parametrize("owner", ["module", pytest.param("data", marks=pytest.mark.slow)])
@layouts(PP2, slow=[MICRO, PP2_DP2])
def test_split_batch_of_the_users_own(layout: Layout, owner: str, tmp_path: Path) -> None:
    _compare(layout, tmp_path, _cut, owner)


class _EmbedAndKeep(nn.Embedding):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.float().unsqueeze(-1)


class _Wide(nn.Module):
    """Two tensors cross each boundary, one of them without a gradient, as every layer uses it;
    positions reach every stage as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _EmbedAndKeep(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(i): nn.Linear(HIDDEN, HIDDEN) for i in range(4)})
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def pipeline_units(self) -> list[str]:
        return ["embed", *(f"layers.{key}" for key in self.layers), "head"]

    def forward(self, x: Any, *, positions: Tensor) -> Any:
        h, first = self.embed(x)
        for layer in self.layers.values():
            h = h + torch.tanh(layer(h) + first * 0.01 + positions.unsqueeze(-1) * 0.1)
        return self.head(h)


class _WideModule(ToyModule):
    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = _Wide()

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        positions = torch.arange(SEQUENCE, dtype=torch.float32).expand(batch["ids"].shape)
        logits = self.model(x=batch["ids"], positions=positions)
        return F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten()), logits


def _wide(layout: Layout, folder: str) -> dict[str, Any]:
    return _fit(layout, folder, _WideModule())


@pytest.mark.slow
@layouts(PP2, MICRO, PP2_DP2, PP2_WHOLE)
def test_several_tensors_between_stages(layout: Layout, tmp_path: Path) -> None:
    _compare(layout, tmp_path, _wide)


class _Itself(pl.LightningModule):
    """The LightningModule is the pipelined module; it is built in ``__init__``; the step returns a
    plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(VOCABULARY, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.third = nn.Linear(HIDDEN, VOCABULARY)

    def pipeline_units(self) -> list[str]:
        return ["first", "second", "third"]

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.first, self.second, self.third):
            x = unit(x)
        return x

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["tgt"].flatten())
        self.log(
            "largest",
            loss,
            reduce_fx="max",
            on_step=False,
            on_epoch=True,
            sync_dist=self.trainer.world_size > 1,
        )
        self.log_dict({"a": loss * 2, "b": 3}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "val_loss",
            F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["tgt"].flatten()),
            sync_dist=True,
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _itself(layout: Layout, folder: str) -> dict[str, Any]:
    result = _fit(layout, folder, _Itself())
    # The largest of micro-batches, or of batches: the module's own definition.
    del result["metrics"]["largest"]
    return result


@layouts(PP2, slow=[MICRO, DP2, PP2_DP2, PP2_WHOLE])
def test_the_lightning_module_itself_is_pipelined(layout: Layout, tmp_path: Path) -> None:
    _compare(layout, tmp_path, _itself)


class _Looks(_Itself):
    """Its test and predict steps look at the data alone."""

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("mean", batch["ids"].float().mean(), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["ids"]


def _looked(layout: Layout, folder: str) -> dict[str, Any]:
    module, data = _Looks(), layout.data_module(num_samples=16)
    trainer = layout.trainer(folder)
    return {
        "tested": trainer.test(module, data),
        "predicted": trainer.predict(module, data.val_dataloader()),
    }


@layouts(PP2, slow=[MICRO])
def test_steps_of_an_evaluation_that_do_not_call_the_model(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _looked, tmp_path):
        assert_close(rank, single(_looked))


class _SkipsSanityChecks(_Itself):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            super().validation_step(batch, batch_idx)


def _validated(layout: Layout, folder: str) -> dict[str, Any]:
    trainer = layout.trainer(folder, max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(_SkipsSanityChecks(), layout.data_module())
    return {"val_loss": trainer.callback_metrics["val_loss"]}


@layouts(PP2)
def test_a_sanity_check_that_does_not_call_the_model(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _validated, tmp_path):
        assert_close(rank, single(_validated))


PP2_VARYING = make_layout(
    "pp2-varying",
    2,
    1,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
    pipeline_options=PipelineOptions(variable_seq_lengths=True),
)


class _Sometimes(_Itself):
    """Predicts every second batch."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        return self(batch["ids"]) if batch_idx % 2 else None


def _sometimes(layout: Layout, folder: str) -> Any:
    module, data = _Sometimes(), layout.data_module(num_samples=32)
    return layout.trainer(folder).predict(module, data.val_dataloader())


@layouts(PP2_VARYING)
def test_steps_of_an_evaluation_that_call_the_model_now_and_then(
    layout: Layout, tmp_path: Path
) -> None:
    for rank in run(layout, _sometimes, tmp_path):
        assert_close(rank, single(_sometimes))
