"""The user's unmodified module under every schedule: training, validation, test, prediction and
logging as on one device."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import PipelineTimeline
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules.actions import Action
from megatron_lightning.pipeline.schedules.partition import partition_units
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyDecoder, ToyModule, samples
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import MICRO, Layout, assert_close, layouts, metrics_of, run, single

_TWO: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}


def _layout(name: str, ranks: int = 2, data: int = 1, **options: Any) -> Layout:
    return Layout(name, ranks, data, tuple({**_TWO, **options}.items()))


INTERLEAVED = _layout("interleaved", virtual_pipeline_model_parallel_size=2)
ZB_H1 = _layout("zb-h1", pipeline_schedule="zb-h1")
ZBV = _layout("zbv", virtual_pipeline_model_parallel_size=2, pipeline_schedule="zbv")
GPIPE_2 = _layout("gpipe-2", virtual_pipeline_model_parallel_size=2, pipeline_schedule="gpipe")
INTERLEAVED_4 = _layout("interleaved-4", virtual_pipeline_model_parallel_size=3)
OWN_TABLE = _layout(
    "own-table",
    pipeline_schedule=["1F0 1B0 1F1 1B1 1F2 1F3 1B2 1B3", "0F0 0F1 0B0 0F2 0F3 0I1 0W1 0B2 0B3"],
)


class _Shifted(ToyDecoder):
    """Every layer reads a keyword argument of the call: the micro-batch's own, on every stage."""

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        h = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            h = layer(h) + shift[:, None, None]
        h = self.norm(h) if self.norm is not None else h
        return self.head(h) if self.head is not None else h


class _Module(ToyModule):
    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = _Shifted(6)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids = torch.where(
            torch.rand(batch["ids"].shape) < 0.2, torch.zeros_like(batch["ids"]), batch["ids"]
        )
        logits = self.model(ids, shift=batch["ids"].float().mean(1))
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["tgt"].flatten()
        ), logits

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["ids"], shift=batch["ids"].float().mean(1))


def _everything(layout: Layout, folder: str) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    # The last batch of an epoch is smaller.
    record, data = Losses(), layout.data_module(num_samples=28)
    trained = layout.trainer(
        folder, max_epochs=2, callbacks=[record], gradient_clip_val=0.5, accumulate_grad_batches=2
    )
    module = _Module()
    trained.fit(module, datamodule=data)
    fitted = metrics_of(trained)
    del fitted["train_mean"]  # counts updates, of which a smaller batch has fewer
    tested = trained.test(module, datamodule=data, verbose=False)
    predicted = torch.cat(trained.predict(module, datamodule=data))
    norms = record.norms if layout.data == 1 else []
    return {"norms": norms, "fitted": fitted, "tested": tested, "predicted": predicted}


@pytest.mark.spread(1)
@layouts(INTERLEAVED, ZB_H1, ZBV, slow=[GPIPE_2, INTERLEAVED_4])
def test_everything_is_as_on_one_device(layout: Layout, tmp_path: Path) -> None:
    """Random masks, keyword arguments on every stage, a ragged last batch, accumulation, clipping,
    metrics, predictions."""
    expected = single(_everything)
    for result in run(layout, _everything, tmp_path):
        assert_close(result, expected, 2e-5)


class _InPlace(ToyDecoder):
    """Every stage begins by changing its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            h += 0.1
            h = layer(torch.relu_(h))
        h = self.norm(h) if self.norm is not None else h
        return self.head(h) if self.head is not None else h


class _Trimmed(ToyModule):
    """How long a micro-batch is follows from its values; a layer is frozen within an epoch."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = _InPlace()

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        length = 4 + int(batch["ids"].sum()) % 5
        return super()._loss({name: values[:, :length] for name, values in batch.items()})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith(("model.embed", "model.layers.0")):
                parameter.requires_grad_(batch_idx % 2 == 0)


def _trim(layout: Layout, folder: str) -> list[float]:
    record = Losses()
    fit = layout.trainer(folder, max_epochs=2, callbacks=[record])
    fit.fit(_Trimmed(), DataLoader(samples(28, 1), batch_size=8))
    return [*record.losses, *record.norms]


_ANY = PipelineOptions(variable_seq_lengths=True)


@pytest.mark.slow
@layouts(
    _layout(
        "zbv",
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule="zbv",
        pipeline_options=_ANY,
    ),
    _layout("interleaved", virtual_pipeline_model_parallel_size=2, pipeline_options=_ANY),
)
def test_shapes_may_follow_from_values(layout: Layout, tmp_path: Path) -> None:
    """Also which layers are trained may change from step to step, and stages may change their input
    in place."""
    expected = run(MICRO, _trim, tmp_path)[0]
    for result in run(layout, _trim, tmp_path):
        assert_close(result, expected)


def test_shapes_that_follow_from_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"same signature.*set variable_seq_lengths of pipeline_options"
    ):
        run(_layout("1f1b"), _trim, tmp_path)


def _two_epochs(layout: Layout, folder: str) -> list[float]:
    record = Losses()
    timeline = [] if layout.options is None else [PipelineTimeline(f"{folder}/timeline", step=1)]
    fit = layout.trainer(folder, max_epochs=2, callbacks=[record, *timeline])
    fit.fit(
        ToyModule(),
        DataLoader(samples(16, 1), batch_size=8),
        DataLoader(samples(6, 2), batch_size=6),
    )
    return [*record.losses, float(fit.callback_metrics["val_loss"])]


@pytest.mark.slow
def test_a_table_of_ones_own_and_the_timeline_of_a_step(tmp_path: Path) -> None:
    """Whole and split backwards in one table, validation with another number of micro-batches; what
    ran is what was written."""
    for result in run(OWN_TABLE, _two_epochs, tmp_path):
        assert_close(result, single(_two_epochs))
    rows: Any = dict(OWN_TABLE.options or ())["pipeline_schedule"]
    for rank, row in enumerate(rows):
        entries = [
            json.loads(line)
            for line in (tmp_path / f"timeline/rank_{rank}.jsonl").read_text().splitlines()
        ]
        assert [f"{e['stage']}{e['action']}{e['microbatch']}" for e in entries] == row.split()
        assert all(entry["rank"] == rank for entry in entries)
        times = [time for entry in entries for time in (entry["start_s"], entry["end_s"])]
        assert times == sorted(times) and times[0] >= 0 and times[-1] < 60


def _launches(layout: Layout, folder: str) -> list[tuple[str, str]]:
    """Return, for every bucket of a step, one of its parameters and the action during which its
    reduction was launched."""
    strategy, position, noted, reduce = (
        layout.strategy(),
        _Position(),
        list[tuple[str, str]](),
        GradientReducer._reduce,
    )

    def note(reducer: GradientReducer, bucket: Bucket) -> None:
        noted.append((bucket.names[0].removeprefix("model."), str(position.action)))
        reduce(reducer, bucket)

    with mock.patch.object(GradientReducer, "_reduce", note):
        trainer(strategy, max_steps=1, default_root_dir=folder, callbacks=[position]).fit(
            ToyModule(), layout.data_module()
        )
    return noted


class _Position(pl.Callback):
    """Observer of the executor: the action that runs."""

    action: Action | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.executor.observers.append(self)  # type: ignore[attr-defined]

    def begin(self, action: Action) -> None:
        self.action = action

    def end(self, action: Action, outputs: object) -> None:
        pass


@pytest.mark.slow
@layouts(
    _layout("zbv", 4, 2, virtual_pipeline_model_parallel_size=2, pipeline_schedule="zbv"),
    _layout("interleaved-ddp", 4, 2, virtual_pipeline_model_parallel_size=2, data_parallel="ddp"),
)
def test_each_chunk_is_reduced_from_its_last_backward_on(layout: Layout, tmp_path: Path) -> None:
    """The reduction over the data-parallel ranks of one chunk runs beside the other chunk's
    remaining actions."""
    choice = schedules.resolve(layout.name.partition("-")[0], num_ranks=2, num_chunks=2)
    table, stages = choice.table(2), partition_units(ToyDecoder().pipeline_units(), 4)
    for rank, noted in enumerate(run(layout, _launches, tmp_path)):
        row = table.actions[rank // 2]
        last = {action.stage: str(action) for action in row}
        stage_of = {unit: stage for stage in last for unit in stages[stage]}
        launched = {
            stage_of[next(u for u in stage_of if name.startswith(u))]: action
            for name, action in noted
        }
        assert launched == last and str(row[-1]) in launched.values()


def test_the_timeline_needs_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SingleDeviceStrategy\. Set strategy to megatron"):
        trainer(max_steps=1, callbacks=[PipelineTimeline()]).fit(
            ToyModule(), DataLoader(samples(8, 1), batch_size=8)
        )
    with pytest.raises(ConfigError, match="step is -1"):
        PipelineTimeline(step=-1)


def test_what_is_deferred_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Four layers of two matrices each and the head are split; each layer's attention is of a kind
    that cannot be."""
    strategy = MegatronStrategy(pipeline_schedule=["0F0 0I0 0W0"], micro_batch_size=8)
    with caplog.at_level(logging.INFO):
        trainer(strategy, max_steps=1).fit(ToyModule(), DataLoader(samples(8, 1), batch_size=8))
    layer = "model.layers.0.self_attn"
    assert re.search(
        r"defers the weight gradients of 9 layers on this rank\. 8 others with matrices compute "
        rf"theirs with the input gradients: {layer}, {layer}.out_proj, .*…\.",
        caplog.text,
    )
