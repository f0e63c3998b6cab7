"""Saves in the background and saves that fail: training continues, and there is always a committed
checkpoint to go back to."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from megatron_lightning.checkpoint import is_committed, open_checkpoint
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.tools.resharding import reshard
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.checkpoint.writing import commit, saving
from megatron_lightning.checkpoint.writing.saver import Saver
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import DDP2, DP2, MICRO, ONE, PP2, PP2_DP2, Layout, layouts, run

ASYNC = CheckpointOptions(async_save=True)


def _committed(folder: str) -> set[str]:
    return {
        entry.name
        for entry in os.scandir(folder)
        if is_committed(entry.path) and ".tmp-" not in entry.name
    }


class _Watch(pl.Callback):
    """Record the committed checkpoints at the beginning of every batch, on rank 0."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = folder, []
        self.seen: list[set[str]]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(_committed(self.folder))


class _Metrics(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append(dict(metrics))


def _slow_begin(self: Any, state: bytes, original: Any = commit.PendingSave.begin) -> None:
    time.sleep(0.15)
    original(self, state)


def _fit(
    layout: Layout, folder: str, options: CheckpointOptions, callbacks: list[Any], **more: Any
) -> tuple[Any, ToyModule]:
    pl.seed_everything(7, verbose=False)
    module = ToyModule()
    path = more.pop("ckpt_path", None)
    fit = trainer(
        layout.strategy(checkpoint_options=options),
        default_root_dir=folder,
        callbacks=callbacks,
        max_steps=8,
        enable_checkpointing=True,
        gradient_clip_val=0.5,
        **more,
    )
    fit.fit(module, datamodule=layout.data_module(num_samples=64), ckpt_path=path)
    return fit, module


def _in_the_background(layout: Layout, folder: str) -> dict[str, Any]:
    # One checkpoint is kept: each save deletes the one before, which until its own commit is all
    # there is.
    keep = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=2
    )
    whole, watch, logger = Losses(), _Watch(folder), _Metrics()
    with mock.patch.object(commit.PendingSave, "begin", _slow_begin):
        fit, module = _fit(layout, folder, ASYNC, [whole, keep, watch], logger=logger)
    report = fit.strategy.last_save
    stalls = [
        metrics["checkpoint_stall_s"]
        for metrics in logger.metrics
        if "checkpoint_stall_s" in metrics
    ]
    left = sorted(os.listdir(folder))
    # and from a checkpoint in the middle, saved in the background as well
    often = ModelCheckpoint(f"{folder}/all", "{step}", save_top_k=-1, every_n_train_steps=2)
    _fit(layout, folder, ASYNC, [often])
    again = Losses()
    _, resumed = _fit(layout, folder, ASYNC, [again], ckpt_path=f"{folder}/all/step=4.ckpt")
    return {
        "left": left,
        "always": all(seen for seen in watch.seen[4:]),  # from the first commit on
        # Training went on before the commit.
        "lag": any("step=4.ckpt" not in seen for seen in watch.seen[4:5]),
        "report": (report.path, report.stall_s < 10, report.written_s > 0.15, report.num_bytes > 0),
        "stalls": len(stalls),
        "equal": again.losses == whole.losses[4:] and again.norms == whole.norms[4:],
        "same": all(
            torch.equal(a, b)
            for a, b in zip(module.parameters(), resumed.parameters(), strict=True)
        ),
    }


@layouts(DP2, slow=[ONE, MICRO, PP2, PP2_DP2, DDP2])
def test_saves_in_the_background(layout: Layout, tmp_path: Path) -> None:
    for rank, result in enumerate(run(layout, _in_the_background, tmp_path)):
        assert result["left"] == ["step=8.ckpt"] or rank > 0  # rank 0 deletes, and waits for that
        assert result["always"] and (rank > 0 or result["lag"])
        assert result["report"] == (str(tmp_path / "step=8.ckpt"), True, True, True)
        assert result["stalls"] == (4 if rank == 0 else result["stalls"])
        assert result["equal"] and result["same"]


class _FullDisk:
    """Fails the writing of the n-th checkpoint on one rank."""

    def __init__(self, rank: int, save: int) -> None:
        self.rank, self.save, self.count, self.original = rank, save, 0, saving._write_rank

    def __call__(self, pending: Any, rank: int, snapshot: Any, max_file_bytes: int) -> Any:
        self.count += 1
        if rank == self.rank and self.count == self.save:
            raise OSError(28, "No space left on device")
        return self.original(pending, rank, snapshot, max_file_bytes)


def _failing(
    layout: Layout, folder: str, background: bool, action: Any, number: int = 2
) -> dict[str, Any]:
    keep = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=2
    )
    watch, error = _Watch(folder), ""
    texts: list[str] = []
    with (
        mock.patch.object(saving, "_write_rank", _FullDisk(layout.ranks - 1, number)),
        mock.patch.object(Saver, "_warn", lambda _, text: texts.append(text)),
    ):
        try:
            _fit(
                layout,
                folder,
                CheckpointOptions(async_save=background, on_save_error=action),
                [keep, watch],
            )
        except CheckpointError as raised:
            error = str(raised)
    warned = any("was not saved" in text and "No space left" in text for text in texts)
    return {
        "error": error,
        "warned": warned,
        "seen": watch.seen,
        "left": sorted(os.listdir(folder)),
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_warns_and_the_older_checkpoint_stays(
    background: bool, tmp_path: Path
) -> None:
    """The second of four saves fails on the last rank: the first checkpoint stays until the third
    is committed."""
    for rank, result in enumerate(run(DP2, _failing, tmp_path, background, "warn")):
        assert result["error"] == "" and (result["left"] == ["step=8.ckpt"] or rank > 0)
        assert result["warned"]
        if not background and rank == 0:
            assert (
                result["seen"][4:6] == [{"step=2.ckpt"}] * 2
                and result["seen"][6:] == [{"step=6.ckpt"}] * 2
            )


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_last_save_deletes_nothing(background: bool, tmp_path: Path) -> None:
    """The last of four saves fails: the third, which it would have replaced, stays."""
    for rank, result in enumerate(run(DP2, _failing, tmp_path, background, "warn", 4)):
        assert result["left"] == ["step=6.ckpt"] or rank > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_raises_on_every_rank(background: bool, tmp_path: Path) -> None:
    for rank, result in enumerate(run(DP2, _failing, tmp_path, background, "raise")):
        assert "No space left on device" in result["error"] and "rank 1" in result["error"]
        assert result["left"] == ["step=2.ckpt"] or rank > 0


class _Boom(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            raise ValueError("boom")


def _interrupted(layout: Layout, folder: str) -> Any:
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    with (
        mock.patch.object(commit.PendingSave, "begin", _slow_begin),
        pytest.raises(ValueError, match="boom"),
    ):
        _fit(layout, folder, ASYNC, [keep, _Boom()])
    return sorted(os.listdir(folder)), open_checkpoint(f"{folder}/step=2.ckpt").state()[
        "global_step"
    ]


def test_an_exception_lets_the_save_come_to_its_end(tmp_path: Path) -> None:
    assert run(DP2, _interrupted, tmp_path)[0] == (["step=2.ckpt"], 2)


def _lightnings_plugin(layout: Layout, folder: str) -> Any:
    strategy = layout.strategy()
    keep = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=4, save_last=True, save_weights_only=True
    )
    plugins = [AsyncCheckpointIO()]
    fit = trainer(
        strategy, callbacks=[keep], max_steps=4, plugins=plugins, enable_checkpointing=True
    )
    fit.fit(ToyModule(), datamodule=layout.data_module())
    state = open_checkpoint(f"{folder}/last.ckpt").state()
    return (
        isinstance(strategy, MegatronStrategy) and strategy.saves_in_background,
        "optimizer_states" in state,
        _committed(folder),
    )


@pytest.mark.slow
def test_lightnings_plugin_asks_for_saves_in_the_background(tmp_path: Path) -> None:
    for result in run(DP2, _lightnings_plugin, tmp_path):
        assert result == (True, False, {"step=4.ckpt", "last.ckpt"})


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("options", "plugins", "how"),
    [
        (ASYNC, [], "in the background"),
        (CheckpointOptions(), [AsyncCheckpointIO()], "in the background"),
        (CheckpointOptions(on_save_error="warn"), [], 'on_save_error="warn"'),
    ],
)
def test_links_to_what_is_not_saved_yet_are_refused(
    options: CheckpointOptions, plugins: list[Any], how: str
) -> None:
    keep = ModelCheckpoint(save_last="link")
    fit = trainer(
        MegatronStrategy(checkpoint_options=options),
        callbacks=[keep],
        plugins=plugins,
        enable_checkpointing=True,
    )
    with pytest.raises(ConfigError, match=f'save_last="link" and .*{how}.*Set save_last=True'):
        fit.fit(ToyModule(), datamodule=ToyData())


def test_links_in_an_object_store_are_refused() -> None:
    fit = trainer(
        MegatronStrategy(),
        callbacks=[ModelCheckpoint("memory://a", save_last="link")],
        enable_checkpointing=True,
    )
    with pytest.raises(ConfigError, match="has no links"):
        fit.fit(ToyModule(), datamodule=ToyData())


def _saved_halfway(layout: Layout, folder: str) -> None:
    _fit(
        layout,
        folder,
        CheckpointOptions(),
        [ModelCheckpoint(folder, f"{layout.name}-{{step}}", every_n_train_steps=4)],
    )


@pytest.mark.slow
def test_resharded_like_a_layout_each_rank_has_a_file(tmp_path: Path) -> None:
    """One rank's checkpoint, cut like one of 2 stages x 2 replicas, is in the files that those four
    would have written."""
    run(ONE, _saved_halfway, tmp_path)
    run(PP2_DP2, _saved_halfway, tmp_path)
    one, ranks, cut = (
        tmp_path / name for name in ("one-step=8.ckpt", "pp2-dp2-step=8.ckpt", "cut.ckpt")
    )
    reshard(one, cut, like=ranks)
    boxes = [
        {
            (name, s.box, s.file.split(".")[2])
            for name, entry in manifest.tensors.items()
            for s in entry.shards
        }
        for manifest in map(read_manifest, (ranks, cut))
    ]
    assert boxes[0] == boxes[1] and len({file for *_, file in boxes[1]}) == 4
    assert read_manifest(cut).info["layout"] == read_manifest(ranks).info["layout"]
    assert verify(cut) == [] and open_checkpoint(cut).state()["global_step"] == 8


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_save_error is 'ignore'"):
        CheckpointOptions(on_save_error="ignore")  # type: ignore[arg-type]


def _in_an_object_store(layout: Layout, folder: str) -> Any:
    files = fsspec.filesystem("memory")
    keep = ModelCheckpoint(
        "memory://run", "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=2
    )
    whole, again = Losses(), Losses()
    data = ToyData(num_samples=64)
    options: dict[str, Any] = {
        "max_steps": 6,
        "enable_checkpointing": True,
        "default_root_dir": folder,
    }
    trainer(MegatronStrategy(), callbacks=[whole, keep], **options).fit(
        ToyModule(), datamodule=data
    )
    left = {path.split("/")[2] for path in files.store}, keep.best_model_path
    middle = ModelCheckpoint("memory://middle", "{step}", save_top_k=-1, every_n_train_steps=2)
    trainer(MegatronStrategy(checkpoint_options=ASYNC), callbacks=[middle], **options).fit(
        ToyModule(), datamodule=data
    )
    fit = trainer(MegatronStrategy(), callbacks=[again], **options)
    fit.fit(ToyModule(), datamodule=data, ckpt_path="memory://middle/step=2.ckpt")
    last = ModelCheckpoint("memory://last", save_last=True, save_top_k=0, every_n_train_steps=2)
    trainer(MegatronStrategy(), callbacks=[last], **{**options, "max_steps": 2}).fit(
        ToyModule(), datamodule=data
    )
    found = Losses()
    fit = trainer(MegatronStrategy(), callbacks=[found, last], **options)
    fit.fit(ToyModule(), datamodule=data, ckpt_path="last")
    return left, again.losses == whole.losses[2:], found.losses == whole.losses[2:]


@pytest.mark.slow
def test_model_checkpoint_in_an_object_store(tmp_path: Path) -> None:
    assert run(ONE, _in_an_object_store, tmp_path) == [
        (({"step=6.ckpt"}, "memory://run/step=6.ckpt"), True, True)
    ]


class _Uploader(DummyLogger):
    """Set to upload checkpoints, as Lightning's own loggers are by ``log_model``."""

    _log_model = True


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("logger", "options", "warnings_of_it"),
    [
        (_Uploader, {}, 1),
        (_Uploader, {"plugins": [TorchCheckpointIO()]}, 0),
        (_Uploader, {"enable_checkpointing": False}, 0),
        (DummyLogger, {}, 0),
    ],
)
def test_a_logger_that_uploads_files_alone_is_named(
    logger: type[DummyLogger], options: dict[str, Any], warnings_of_it: int, tmp_path: Path
) -> None:
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    fitted = trainer(
        MegatronStrategy(), **{"max_steps": 1, "logger": logger(), **saving, **options}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(ToyModule(), ToyData(num_samples=8))
    assert sum("has log_model set" in str(warning.message) for warning in caught) == warnings_of_it
