"""Callbacks that copy, average or search: EMA, SWA, learning-rate finder, prediction writer,
exceptions, monitors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from megatron_lightning.checkpoint import read_full
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    PP2,
    PP2_DP2,
    TP2_TOY,
    Layout,
    assert_close,
    layouts,
    metrics_of,
    run,
    single,
)


def _weights(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Return the parameters but the attention's bias: a constant added to all keys changes nothing,
    so its gradient is rounding noise, which AdamW scales up."""
    return {
        name: p.detach()
        for name, p in module.named_parameters()
        if not name.endswith("in_proj_bias")
    }


def _averaging(kind: str) -> pl.Callback:
    if kind == "ema":
        return EMAWeightAveraging(decay=0.8)
    return WeightAveraging()


def _averaged(layout: Layout, folder: str, kind: str) -> dict[str, Any]:
    """Train with averaged weights, save in the middle, resume from there with everything created
    again."""
    data = layout.data_module()
    options: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": True}
    whole_module = ToyModule()
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = layout.trainer(folder, callbacks=[_averaging(kind), keep], **options)
    trainer.fit(whole_module, datamodule=data)
    whole = {"metrics": metrics_of(trainer), "state": _weights(whole_module)}
    resumed_module = ToyModule()
    trainer = layout.trainer(folder, callbacks=[_averaging(kind)], **options)
    trainer.fit(resumed_module, datamodule=layout.data_module(), ckpt_path=f"{folder}/epoch=0.ckpt")
    resumed = {"metrics": metrics_of(trainer), "state": _weights(resumed_module)}
    return {"whole": whole, "resumed": resumed}


@pytest.mark.parametrize("kind", ["ema", pytest.param("average", marks=pytest.mark.slow)])
@layouts(PP2, DP2, slow=[MICRO, DDP2, PP2_DP2])
@pytest.mark.spread(1)
def test_averaged_weights_and_their_resume(layout: Layout, kind: str, tmp_path: Path) -> None:
    expected = single(_averaged, kind)["whole"]
    for rank in run(layout, _averaged, tmp_path, kind):
        assert_close(rank["whole"]["metrics"], expected["metrics"])
        assert_close(rank["resumed"], rank["whole"], 0.0)  # stopping and going on changes no bit
        for name, parameter in rank["whole"]["state"].items():
            assert_close(parameter, expected["state"][name], where=name)


class _BuildsAnew(ToyModule):
    def configure_model(self) -> None:
        self.model = None
        super().configure_model()


def _averaged_anew(layout: Layout, folder: str) -> dict[str, Any]:
    """Weight averaging calls configure_model before the Trainer does."""
    module = _BuildsAnew()
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[_averaging("ema")])
    trainer.fit(module, datamodule=layout.data_module())
    return {"metrics": metrics_of(trainer), "state": _weights(module)}


@pytest.mark.slow
@layouts(PP2)
def test_averaging_of_a_model_that_is_built_anew_by_every_call(
    layout: Layout, tmp_path: Path
) -> None:
    expected = single(_averaged_anew)
    ranks = run(layout, _averaged_anew, tmp_path)
    assert {name for rank in ranks for name in rank["state"]} == expected["state"].keys()
    for rank in ranks:
        assert len(rank["state"]) < len(expected["state"])  # each has its part
        assert_close(rank["metrics"], expected["metrics"])
        for name, parameter in rank["state"].items():
            assert_close(parameter, expected["state"][name], where=name)


def _fitted_twice(layout: Layout, folder: str) -> dict[str, Any]:
    module, sizes = _BuildsAnew(), []
    for _ in range(2):
        trainer = layout.trainer(folder, max_epochs=1)
        trainer.fit(module, datamodule=layout.data_module())
        sizes.append(sum(parameter.numel() for parameter in module.parameters()))
    return {"metrics": metrics_of(trainer), "sizes": sizes}


@pytest.mark.slow
@layouts(TP2_TOY)
def test_a_model_that_is_built_anew_is_divided_again(layout: Layout, tmp_path: Path) -> None:
    expected = single(_fitted_twice)
    for rank in run(layout, _fitted_twice, tmp_path):
        assert rank["sizes"][0] == rank["sizes"][1] < expected["sizes"][0]
        assert_close(rank["metrics"], expected["metrics"])


def _swa(layout: Layout, folder: str, path: str | None = None) -> dict[str, Any]:
    """Average at once, or resume from the second epoch."""
    module = ToyModule()
    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = layout.trainer(folder, max_epochs=3, callbacks=[swa, keep], enable_checkpointing=True)
    trainer.fit(module, datamodule=layout.data_module(), ckpt_path=path)
    return {
        "state": _weights(module),
        "after": trainer.validate(module, datamodule=layout.data_module(), verbose=False),
    }


def _swa_and_resume(layout: Layout, folder: str) -> list[dict[str, Any]]:
    return [_swa(layout, folder), _swa(layout, folder, f"{folder}/epoch=1.ckpt")]


@pytest.mark.slow
@layouts(TP2_TOY, slow=[PP2, DP2, PP2_DP2, MICRO])
def test_stochastic_weight_averaging(layout: Layout, tmp_path: Path) -> None:
    expected = single(_swa)
    for whole, resumed in run(layout, _swa_and_resume, tmp_path):
        assert_close(resumed, whole, 0.0)
        assert_close(whole["after"], expected["after"])
        for name, parameter in whole["state"].items():
            if parameter.shape == expected["state"][name].shape:  # else a shard
                assert_close(parameter, expected["state"][name], where=name)


def _pruned(layout: Layout, folder: str, lottery: bool) -> dict[str, Any]:
    """Pruning gives parameters other names; half of the head's smallest weights are zero after the
    first epoch."""
    module = ToyModule()
    module.configure_model()
    head = [(module.model.head, "weight")]
    options: dict[str, Any] = {
        "use_global_unstructured": False,
        "use_lottery_ticket_hypothesis": lottery,
    }
    prune = ModelPruning(
        "l1_unstructured", head, amount=lambda epoch: 0.5 * (epoch == 0), **options
    )
    trainer = layout.trainer(
        folder, max_epochs=3, callbacks=[prune, ModelCheckpoint(folder)], enable_checkpointing=True
    )
    trainer.fit(module, datamodule=layout.data_module())
    saved = (
        read_full(trainer.checkpoint_callback.best_model_path)
        if layout.options is not None
        else None
    )
    kept = module.state_dict() if saved is None else saved["state_dict"]
    return {
        "metrics": metrics_of(trainer),
        "head": module.model.head.weight.detach(),
        "kept": kept["model.head.weight"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("lottery", [False, True])
def test_pruning(lottery: bool, tmp_path: Path) -> None:
    """With the lottery-ticket hypothesis the weights go back to their first values."""
    expected = single(_pruned, lottery)
    assert int((expected["head"] == 0).sum()) == expected["head"].numel() // 2
    for rank in run(DDP2, _pruned, tmp_path, lottery):
        assert_close(rank, expected)


def _finder(layout: Layout, folder: str) -> dict[str, Any]:
    trainer = layout.trainer(folder, max_epochs=1)
    module = ToyModule(lr=1e-3)
    found = Tuner(trainer).lr_find(
        module, datamodule=layout.data_module(num_samples=64), num_training=16, attr_name="lr"
    )
    trainer.fit(module, datamodule=layout.data_module())
    return {
        "losses": found.results["loss"],
        "lr": module.hparams.lr,
        "metrics": metrics_of(trainer),
    }


@pytest.mark.slow
@layouts(PP2, DP2, PP2_DP2, MICRO)
def test_learning_rate_finder(layout: Layout, tmp_path: Path) -> None:
    expected, ranks = single(_finder), run(layout, _finder, tmp_path)
    assert len({rank["lr"] for rank in ranks}) == 1, "ranks must train with one rate"
    if layout.data == 1:  # Lightning's search reads the loss of rank 0, of its share of the batch
        # Late in the search the rate is high and the loss chaotic: the last bits grow. The choice
        # comes from the early part.
        assert_close(ranks[0]["losses"][:8], expected["losses"][:8])
        assert ranks[0]["lr"] == pytest.approx(expected["lr"])


class _Writer(BasePredictionWriter):
    def __init__(self, folder: str) -> None:
        super().__init__("batch_and_epoch")
        self.folder, self.batches = folder, []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        self.batches.append((list(batch_indices), prediction))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.all = ([[list(b) for b in loader] for loader in batch_indices], len(predictions))


def _predict(layout: Layout, folder: str) -> dict[str, Any]:
    writer = _Writer(folder)
    trainer = layout.trainer(folder, callbacks=[writer])
    returned = trainer.predict(ToyModule(), datamodule=layout.data_module())
    return {"batches": writer.batches, "all": writer.all, "returned": returned}


@layouts(PP2_DP2, slow=[PP2, DP2, MICRO])
def test_predictions_and_their_indices(layout: Layout, tmp_path: Path) -> None:
    """Every sample once, under its own index; each replica returns its share (as Lightning's DDP),
    all its stages the same."""
    expected = {}
    for indices, prediction in single(_predict)["batches"]:
        expected.update(zip(indices, prediction, strict=True))
    seen: list[int] = []
    for rank in run(layout, _predict, tmp_path):
        assert len(rank["returned"]) == len(rank["batches"])
        for (indices, prediction), returned in zip(rank["batches"], rank["returned"], strict=True):
            assert_close(prediction, torch.stack([expected[index] for index in indices]))
            assert torch.equal(prediction, returned)
            seen += indices
        assert rank["all"] == ([[indices for indices, _ in rank["batches"]]], len(rank["batches"]))
    copies = layout.ranks // layout.data
    assert sorted(seen) == sorted(list(expected) * copies)


def _train_monitor(layout: Layout, folder: str) -> dict[str, Any]:
    stop = EarlyStopping("train_loss_epoch", patience=0, min_delta=0.6)
    best = ModelCheckpoint(
        folder,
        "{step}-{train_mean:.3f}",
        monitor="train_mean",
        save_top_k=1,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
    )
    trainer = layout.trainer(
        folder, max_epochs=6, callbacks=[stop, best], enable_checkpointing=True, limit_val_batches=0
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return {
        "stopped": stop.stopped_epoch,
        "best": os.path.basename(best.best_model_path),
        "score": float(best.best_model_score),
    }


@pytest.mark.slow
@layouts(PP2, DP2, PP2_DP2, MICRO)
def test_monitors_of_training_metrics(layout: Layout, tmp_path: Path) -> None:
    expected = single(_train_monitor)
    assert 0 < expected["stopped"] < 5
    for rank in run(layout, _train_monitor, tmp_path):
        assert_close(rank, expected)


def _best_and_last(layout: Layout, folder: str) -> dict[str, Any]:
    """``ckpt_path`` "best" and "last" find what ModelCheckpoint wrote."""
    # "max": the first epoch is best.
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", mode="max", save_last=True)
    trainer = layout.trainer(folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    module, data = ToyModule(), layout.data_module()
    trainer.fit(module, datamodule=data)
    now = trainer.validate(module, datamodule=data, verbose=False)
    best = trainer.validate(module, datamodule=data, ckpt_path="best", verbose=False)
    tested = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    last = trainer.test(datamodule=data, ckpt_path="last", verbose=False)
    predicted = trainer.predict(datamodule=data, ckpt_path="best") if layout.data == 1 else None
    record = Losses()
    more = layout.trainer(
        folder,
        max_epochs=4,
        callbacks=[record, ModelCheckpoint(folder, save_last=True)],
        enable_checkpointing=True,
    )
    more.fit(ToyModule(), datamodule=layout.data_module(), ckpt_path="last")
    results = {
        "now": now,
        "best": best,
        "tested": tested,
        "last": last,
        "file": os.path.basename(keep.best_model_path),
    }
    return {**results, "predicted": predicted, "more": record.norms, "epochs": more.current_epoch}


@pytest.mark.spread(1)
@layouts(PP2, DP2, slow=[PP2_DP2, MICRO])
def test_checkpoint_path_best_and_last(layout: Layout, tmp_path: Path) -> None:
    expected = single(_best_and_last)
    assert expected["best"] != expected["now"]
    for rank in run(layout, _best_and_last, tmp_path):
        if layout.data > 1:
            rank["predicted"] = expected["predicted"]
        assert_close(rank, expected)


class _Boom(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            raise ValueError("boom")


def _interrupted(layout: Layout, folder: str) -> list[str]:
    seen: list[str] = []
    note = LambdaCallback(on_exception=lambda trainer, module, error: seen.append(repr(error)))
    rescue = OnExceptionCheckpoint(folder, "rescue")
    trainer = layout.trainer(
        folder, max_epochs=1, callbacks=[_Boom(), note, rescue], enable_checkpointing=True
    )
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(ToyModule(), datamodule=layout.data_module())
    return seen


def _rescued(layout: Layout, folder: str) -> tuple[list[float], int]:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[record])
    path = None if layout.options is None else f"{folder}/rescue.ckpt"
    trainer.fit(ToyModule(), datamodule=layout.data_module(), ckpt_path=path)
    return record.norms, trainer.global_step


@pytest.mark.slow
@layouts(PP2, DP2, MICRO)
def test_exception_on_every_rank_leaves_a_checkpoint(layout: Layout, tmp_path: Path) -> None:
    """An error that all ranks meet at the same place: the callback saves, and training resumes from
    there."""
    assert run(layout, _interrupted, tmp_path) == [["ValueError('boom')"]] * layout.ranks
    norms, steps = single(_rescued)  # never interrupted
    for rank in run(layout, _rescued, tmp_path):
        assert_close(rank, (norms[2:], steps))
