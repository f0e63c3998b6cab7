"""Copies on the nodes' own disks: written beside training, agreed on by all ranks, read by layouts
that find them whole."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import LocalCopyCheckpoint
from megatron_lightning.checkpoint.local_copies import local
from megatron_lightning.checkpoint.writing.saver import Saver
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import DDP2, DP2, ONE, PP2, PP2_DP2, TOLERANCE, Layout, layouts, run

STOP = 3


def _fit(
    layout: Layout, folder: str, *callbacks: pl.Callback, ckpt_path: str | None = None, **more: Any
) -> tuple[list[torch.Tensor], list[float]]:
    record, module = Losses(), ToyModule()
    strategy = layout.strategy(checkpoint_options=more.pop("checkpoint_options", None))
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, **more}
    fit = trainer(
        strategy,
        default_root_dir=folder,
        callbacks=[record, *callbacks],
        enable_checkpointing=True,
        **options,
    )
    fit.fit(module, datamodule=layout.data_module(), ckpt_path=ckpt_path)
    return [p.detach().clone() for p in module.parameters()], record.losses


def _lose(*paths: str) -> None:
    """Delete what a lost node had, between two runs."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _lost_nodes(layout: Layout, folder: str) -> dict[str, Any]:
    """Train on two nodes of one rank each; resume after either's disk is lost, and after both
    copies of a part are."""
    os.environ["LOCAL_RANK"] = "0"
    nodes: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    disk = f"{folder}/disk-{{node_rank}}"

    def copies() -> LocalCopyCheckpoint:
        return LocalCopyCheckpoint(disk, every_n_train_steps=1, dirpath=folder)

    whole, losses = _fit(layout, f"{folder}/whole", **nodes)
    often = ModelCheckpoint(
        folder, "shared", every_n_train_steps=2, save_top_k=1, enable_version_counter=False
    )
    _, first = _fit(layout, folder, copies(), often, max_steps=STOP, **nodes)
    kept = sorted(len(os.listdir(f"{folder}/disk-{node}")) for node in range(2))
    result: dict[str, Any] = {"first": first == losses[:STOP], "kept": kept}
    for lost in (0, 1):
        _lose(f"{folder}/disk-{lost}")
        end, rest = _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
        same = all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
        result[f"lost {lost}"] = (rest == losses[STOP:], same)
    # The pointer is the newest.
    end, rest = _fit(layout, folder, copies(), ckpt_path="last", **nodes)
    result["last"] = rest == losses[STOP:]
    _lose(f"{folder}/disk-0", f"{folder}/disk-1")
    _, rest = _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
    result["shared"] = rest == losses[STOP - 1 :]  # saved at step 2
    _lose(f"{folder}/shared.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r"local copies in .* none has the parts of all 2 ranks .* no other checkpoint",
    ):
        _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
    return result


@layouts(DP2, slow=[PP2])
def test_local_copies_survive_the_loss_of_a_node(layout: Layout, tmp_path: Path) -> None:
    expected = {
        "first": True,
        "kept": [2, 2],
        "lost 0": (True, True),
        "lost 1": (True, True),
        "last": True,
        "shared": True,
    }
    for rank in run(layout, _lost_nodes, tmp_path):
        assert rank == expected


def test_copies_need_one_interval() -> None:
    for intervals in (
        {},
        {"every_n_train_steps": 1, "every_n_minutes": 1.0},
        {"every_n_minutes": 0.0},
    ):
        with pytest.raises(ConfigError, match="need one interval"):
            LocalCopyCheckpoint("folder", **intervals)


def _copied(layout: Layout, folder: str) -> list[float]:
    copies = LocalCopyCheckpoint(f"{folder}/disk", every_n_train_steps=1, dirpath=folder)
    return _fit(layout, folder, copies, max_steps=STOP)[1]


def _resumed(layout: Layout, folder: str) -> list[float]:
    return _fit(layout, folder, ckpt_path=f"{folder}/local.ckpt")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PP2, DP2, id="pp2-to-dp2"),
        pytest.param(DP2, ONE, id="2-to-1"),
        pytest.param(DP2, DDP2, id="zero1-to-ddp"),
        pytest.param(ONE, PP2_DP2, id="1-to-pp2-dp2"),
        pytest.param(PP2_DP2, PP2, id="pp2-dp2-to-pp2"),
    ],
)
def test_another_layout_resumes_from_copies_that_are_complete_on_its_node(
    before: Layout, after: Layout, tmp_path: Path
) -> None:
    """Losses are those of the other layout from the same step on."""
    run(before, _copied, tmp_path)
    straight = run(after, _straight, tmp_path)
    for losses, whole in zip(run(after, _resumed, tmp_path), straight, strict=True):
        assert losses == pytest.approx(whole[STOP:], rel=TOLERANCE)


def _straight(layout: Layout, folder: str) -> list[float]:
    return _fit(layout, f"{folder}/straight")[1]


def _elsewhere(layout: Layout, folder: str) -> str:
    """Resume two nodes' copies on two ranks of another layout, of which neither finds all parts."""
    os.environ["LOCAL_RANK"] = "0"
    disk = f"{folder}/disk-{{node_rank}}"
    nodes: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    # As on three nodes, where no node has all parts.
    with mock.patch.object(local.LocalCopies, "_replicate"):
        _fit(
            layout,
            folder,
            LocalCopyCheckpoint(disk, every_n_train_steps=1, dirpath=folder),
            max_steps=STOP,
            **nodes,
        )
    with pytest.raises(
        CheckpointError, match=r"are of another layout .* not every node has all parts"
    ) as caught:
        _fit(DP2, folder, ckpt_path=f"{folder}/local.ckpt", **nodes)
    return str(caught.value)


@pytest.mark.slow
def test_copies_of_another_layout_in_pieces_are_not_mixed(tmp_path: Path) -> None:
    for text in run(PP2, _elsewhere, tmp_path):
        assert (
            "2 ranks of {'tensor_model_parallel_size': 1, 'pipeline_model_parallel_size': 2" in text
        )


class _Slow(pl.Callback):
    """Counts steps that begin while a copy is being written."""

    def __init__(self) -> None:
        self.beside = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        report = trainer.strategy.last_save  # type: ignore[attr-defined]
        self.beside += report is not None and report.written_s is None


def _beside_training(layout: Layout, folder: str) -> int:
    original, watch = local.write_snapshot, _Slow()

    def slow(snapshot: Any) -> None:
        time.sleep(0.3)
        original(snapshot)

    with mock.patch.object(local, "write_snapshot", slow):
        _fit(
            layout,
            folder,
            LocalCopyCheckpoint(f"{folder}/disk", every_n_train_steps=2, dirpath=folder),
            watch,
        )
    return watch.beside


@pytest.mark.slow
def test_training_continues_during_the_save(tmp_path: Path) -> None:
    assert all(count > 0 for count in run(DP2, _beside_training, tmp_path))


def _failing(layout: Layout, folder: str, where: str, action: Any) -> dict[str, Any]:
    """The second node's disk is full when the second copy is written: its own part, or its
    neighbour's."""
    os.environ["LOCAL_RANK"] = "0"
    original, error = getattr(local, where), ""
    texts: list[str] = []

    def full(target: Any, *arguments: Any) -> Any:
        if dist.get_rank() == 1 and "step-000000000004" in str(getattr(target, "path", target)):
            raise OSError(28, "No space left on device")
        return original(target, *arguments)

    copies = LocalCopyCheckpoint(
        f"{folder}/disk-{{node_rank}}", every_n_train_steps=2, dirpath=folder
    )
    options: dict[str, Any] = {
        "num_nodes": 2,
        "devices": 1,
        "checkpoint_options": CheckpointOptions(on_save_error=action),
    }
    with (
        mock.patch.object(local, where, full),
        mock.patch.object(Saver, "_warn", lambda _, text: texts.append(text)),
    ):
        try:
            _fit(layout, folder, copies, **options)
        except CheckpointError as raised:
            error = str(raised)
    pointer = local.Pointer.read(f"{folder}/local.ckpt")
    return {"error": error, "warning": "".join(texts), "step": pointer.step if pointer else None}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write_snapshot", "write_file"])
def test_a_failure_on_one_rank_is_every_ranks(where: str, tmp_path: Path) -> None:
    for rank in run(DP2, _failing, tmp_path / "raise", where, "raise"):
        assert "No space left" in rank["error"] and "rank 1" in rank["error"] and rank["step"] == 2
    for rank in run(DP2, _failing, tmp_path / "warn", where, "warn"):
        assert rank["error"] == "" and "No space left" in rank["warning"] and rank["step"] == 8
