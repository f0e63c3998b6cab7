"""Saving before the end: SIGTERM on any rank, and every so many minutes; going on is bit-equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed import DistNetworkError

from megatron_lightning import compat
from megatron_lightning.callbacks import LocalCopyCheckpoint, RescueCheckpoint
from megatron_lightning.checkpoint import is_committed, open_checkpoint
from megatron_lightning.checkpoint.writing import commit
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.ranks import ProcessGroups
from megatron_lightning.lightning_internals.checkpoints import checkpoint_folder
from megatron_lightning.optim.stepping.external_writes import WrittenWeights
from megatron_lightning.resilience.failure_watch import FailureWatch
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DP2,
    ONE,
    PP2,
    PP2_DP2,
    SINGLE,
    Layout,
    layouts,
    make_layout,
    run,
)

STOP = 3
PP2_ASYNC = make_layout(
    "pp2-async",
    2,
    1,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
    checkpoint_options=CheckpointOptions(async_save=True),
)


class _Terminated(pl.Callback):
    """Sends SIGTERM to one rank in the middle of a batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(
    layout: Layout, folder: str, *callbacks: pl.Callback, ckpt_path: str | None = None, **more: Any
) -> tuple[Any, list[float]]:
    record, module = Losses(), more.pop("module", None) or ToyModule()
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, **more}
    trainer = layout.trainer(folder, callbacks=[record, *callbacks], **options)
    try:
        trainer.fit(module, datamodule=layout.data_module(), ckpt_path=ckpt_path)
    except SystemExit as end:
        return type(end).__name__, record.losses
    return [p.detach().clone() for p in module.parameters()], record.losses


def _rescued(layout: Layout, folder: str, *callbacks: pl.Callback) -> dict[str, Any]:
    whole, losses = _fit(layout, f"{folder}/whole")
    handler = signal.getsignal(signal.SIGTERM)
    end, first = _fit(
        layout, folder, *callbacks, RescueCheckpoint(folder), _Terminated(rank=layout.ranks - 1)
    )
    restored = signal.getsignal(signal.SIGTERM) is handler
    going_on, rest = _fit(layout, folder, *callbacks, RescueCheckpoint(folder), ckpt_path="last")
    same = all(torch.equal(a, b) for a, b in zip(whole, going_on, strict=True))
    return {
        "end": end,
        "restored": restored,
        "steps": (len(first), len(rest)),
        "losses": first + rest == losses,
        "same": same,
    }


@layouts(PP2, slow=[PP2_DP2])
def test_sigterm_on_one_rank_saves_on_all_and_going_on_is_bit_equal(
    layout: Layout, tmp_path: Path
) -> None:
    for rank in run(layout, _rescued, tmp_path):
        assert rank == {
            "end": "AgreedStop",
            "restored": True,
            "steps": (STOP, 8 - STOP),
            "losses": True,
            "same": True,
        }
    assert is_committed(tmp_path / "rescue.ckpt")


def _rescued_from_the_background(layout: Layout, folder: str) -> dict[str, Any]:
    """Every step begins a save in the background that takes as long as some steps; SIGTERM comes
    while one is written."""
    keep = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1
    )
    begin = commit.PendingSave.begin

    def slow(self: Any, state: bytes) -> None:
        time.sleep(0.3)
        begin(self, state)

    with mock.patch.object(commit.PendingSave, "begin", slow):
        result = _rescued(layout, folder, keep)
    return result | {
        "running": [
            thread.name for thread in threading.enumerate() if thread.name == "checkpoint-save"
        ]
    }


@pytest.mark.slow
def test_sigterm_while_a_save_is_written_in_the_background(tmp_path: Path) -> None:
    for rank in run(PP2_ASYNC, _rescued_from_the_background, tmp_path):
        assert rank.pop("running") == []
        assert rank == {
            "end": "AgreedStop",
            "restored": True,
            "steps": (STOP, 8 - STOP),
            "losses": True,
            "same": True,
        }
    assert {path.name for path in tmp_path.glob("*.ckpt*")} == {"rescue.ckpt", "step=8.ckpt"}


class _TerminatedInEvaluation(pl.Callback):
    """Sends a signal to one rank in the second batch of an evaluation; notes the metrics of each
    validation."""

    def __init__(self, rank: int, step: int, signum: int = signal.SIGTERM) -> None:
        self.rank, self.step, self.signum = rank, step, signum
        self.metrics: list[tuple[int, float]] = []

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step and batch_idx == 1:
            os.kill(os.getpid(), self.signum)

    on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def _ended_in_validation(layout: Layout, folder: str, step: int) -> dict[str, Any]:
    rank, never, after = layout.ranks - 1, -1, _TerminatedInEvaluation(0, -1)
    options: dict[str, Any] = {"val_check_interval": 2, "module": ToyModule(mask=True)}
    straight = _TerminatedInEvaluation(rank, never)
    whole, losses = _fit(layout, f"{folder}/whole", straight, **options)
    options["module"] = ToyModule(mask=True)
    end, first = _fit(
        layout, folder, RescueCheckpoint(folder), _TerminatedInEvaluation(rank, step), **options
    )
    options["module"] = ToyModule(mask=True)
    going_on, rest = _fit(
        layout, folder, RescueCheckpoint(folder), after, ckpt_path="last", **options
    )
    return {
        "end": end,
        "steps": len(first),
        "losses": first + rest == losses,
        "same": all(torch.equal(a, b) for a, b in zip(whole, going_on, strict=True)),
        "validation": after.metrics == straight.metrics[step // 2 - 1 :],  # whole, once more
    }


# Within an epoch, and at its end.
@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
@layouts(PP2, ONE, PP2_DP2)
def test_sigterm_in_validation_saves_at_once_and_the_validation_is_repeated(
    layout: Layout, step: int, tmp_path: Path
) -> None:
    for rank in run(layout, _ended_in_validation, tmp_path, step):
        assert rank == {
            "end": "AgreedStop",
            "steps": step,
            "losses": True,
            "same": True,
            "validation": True,
        }


def _just_ended(layout: Layout, folder: str) -> list[str]:
    ends, handler = [], signal.getsignal(signal.SIGTERM)
    for entry, options in (("fit", {"num_sanity_val_steps": 3}), ("validate", {}), ("predict", {})):
        callbacks = [RescueCheckpoint(folder), _TerminatedInEvaluation(0, 0)]
        trainer = layout.trainer(
            folder, enable_checkpointing=True, callbacks=callbacks, max_steps=1, **options
        )
        try:
            getattr(trainer, entry)(ToyModule(), datamodule=layout.data_module())
        except SystemExit as end:
            ends.append(type(end).__name__)
        assert signal.getsignal(signal.SIGTERM) is handler
    return ends


def test_sigterm_just_ends_what_has_nothing_to_save(tmp_path: Path) -> None:
    for ends in run(DP2, _just_ended, tmp_path):
        assert ends == ["AgreedStop"] * 3
    assert not (tmp_path / "rescue.ckpt").exists()


@pytest.mark.spread(1)
@pytest.mark.parametrize("array", [False, True])
def test_slurms_requeue_signal_saves_where_lightning_looks(
    array: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLURM_JOB_ID", "17"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_NAME", "train")):
        monkeypatch.setenv(name, value)
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    tool = tmp_path / "scontrol"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plugin = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    options: dict[str, Any] = {"val_check_interval": 2, "plugins": plugin}
    told = _TerminatedInEvaluation(0, 2, signal.SIGUSR1)
    end, first = _fit(ONE, str(tmp_path), RescueCheckpoint(str(tmp_path)), told, **options)
    assert end == "AgreedStop" and len(first) == 2
    assert is_committed(tmp_path / "hpc_ckpt_1.ckpt") and not (tmp_path / "rescue.ckpt").exists()
    assert (tmp_path / "calls").read_text() == ("requeue 16_3\n" if array else "requeue 17\n")
    # Of a save that was killed: Lightning sees number 20123456789.
    (tmp_path / "hpc_ckpt_2.ckpt.tmp-0123456789ab").mkdir()
    # Without ckpt_path, and as "last", which no callback has saved.
    for path in (None, "last"):
        rescue, keep = RescueCheckpoint(str(tmp_path)), ModelCheckpoint(tmp_path, save_last=True)
        callbacks = [rescue] if path is None else [rescue, keep]
        _, rest = _fit(ONE, str(tmp_path), *callbacks, ckpt_path=path, **options)
        assert len(rest) == 6
    # Outside of Slurm the file may be another run's in the same folder.
    with monkeypatch.context() as outside:
        outside.delenv("SLURM_NTASKS")
        own_folder = ModelCheckpoint(tmp_path / "own", save_last=True)
        _, losses = _fit(ONE, str(tmp_path), own_folder, ckpt_path="last", **options)
        assert len(losses) == 8
    # Newer than the job's save.
    _, rest = _fit(ONE, str(tmp_path), keep, ckpt_path="last", **options)
    assert not rest


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchrun_passes_sigterm_on(tmp_path: Path) -> None:
    """torchrun gives its workers half a minute between SIGTERM and SIGKILL; the next run
    resumes."""

    def command(steps: int) -> list[str]:
        standalone = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return [
            sys.executable,
            *standalone,
            "-m",
            "tests.faults.rescued_job",
            str(tmp_path),
            str(steps),
        ]

    with subprocess.Popen(
        command(100_000), stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as job:
        assert job.stdout is not None
        line = next(line for line in job.stdout if line.startswith("STEP 0 3"))
        job.terminate()
        output = line + job.communicate(timeout=100)[0]
    steps = [
        int(words[2]) for words in map(str.split, output.splitlines()) if words[:2] == ["STEP", "0"]
    ]
    saved = open_checkpoint(tmp_path / "rescue.ckpt").state()["global_step"]
    # The last line may be lost on its way.
    assert job.returncode != 0 and saved in (steps[-1], steps[-1] + 1)
    done = subprocess.run(
        command(saved + 2),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert f"DONE 0 {saved + 2}" in done.stdout and f"STEP 0 {saved}\n" not in done.stdout


class _Fails(pl.Callback):
    """Raises on every rank in step ``STOP``: on each where it is told to."""

    def __init__(self, *places: str) -> None:
        self.places = places

    def _fail(self, trainer: pl.Trainer, place: str) -> None:
        if self.places[trainer.global_rank % len(self.places)] == place:
            raise ValueError(f"raised {place}")

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == STOP:
            self._fail(trainer, "before the update")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STOP + 1:
            self._fail(trainer, "after the update")


def _failed(layout: Layout, folder: str, *places: str) -> dict[str, Any]:
    whole, losses = _fit(layout, f"{folder}/whole")
    impatient = partialmethod(ProcessGroups.all_interrupted, within_s=1.0)
    own_share, shared_after = WrittenWeights.share, list[bool]()

    def share(written: WrittenWeights, **options: Any) -> bool:
        shared_after.append(trainer.state.status == TrainerStatus.INTERRUPTED)
        return own_share(written, **options)

    trainer = layout.trainer(
        folder,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[RescueCheckpoint(folder, on_sigterm=False), _Fails(*places)],
    )
    with (
        mock.patch.object(ProcessGroups, "all_interrupted", impatient),
        # It would end the ranks of this test.
        mock.patch.object(FailureWatch, "report", return_value=False),
        mock.patch.object(compat, "abort_process_groups"),
        mock.patch.object(WrittenWeights, "share", share),
        pytest.raises(ValueError, match="raised"),
    ):
        trainer.fit(ToyModule(), datamodule=layout.data_module())
    if not is_committed(f"{folder}/rescue.ckpt"):
        return {"saved": False, "collective": any(shared_after)}
    end, rest = _fit(layout, folder, RescueCheckpoint(folder), ckpt_path="last")
    same = all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
    return {"saved": True, "losses": rest == losses[-len(rest) :], "steps": len(rest), "same": same}


def test_an_exception_in_a_step_repeats_its_batch(tmp_path: Path) -> None:
    for rank in run(PP2, _failed, tmp_path, "before the update"):
        assert rank == {"saved": True, "losses": True, "steps": 8 - STOP, "same": True}


@pytest.mark.slow
def test_ranks_that_an_exception_meets_on_two_sides_of_an_update_save_nothing(
    tmp_path: Path,
) -> None:
    for rank in run(PP2, _failed, tmp_path, "after the update", "before the update"):
        assert rank == {"saved": False, "collective": False}


def test_a_rank_whose_rank_0_is_gone_is_alone() -> None:
    """The store that ranks meet over ends with rank 0; its loss must not hide the exception."""
    ranks, store = MegatronStrategy().ranks, mock.Mock()
    ranks._context = mock.Mock(world_size=2)
    store.add.side_effect = [
        1,
        1,
        DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    ]
    with mock.patch.object(compat, "default_store", return_value=store):
        assert not ranks.all_interrupted("step 3")


def test_a_rank_that_has_left_the_others_is_alone() -> None:
    """As after an exception that a script catches, to save a checkpoint."""
    assert not dist.is_initialized()
    assert not MegatronStrategy().ranks.all_interrupted("step 3")


def _saves(layout: Layout, folder: str, every_n_minutes: float, accumulate: int) -> list[int]:
    saved: list[int] = []

    class Counted(RescueCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            saved.append(trainer.global_step)

    options: dict[str, Any] = {
        "max_epochs": 1,
        "enable_checkpointing": True,
        "accumulate_grad_batches": accumulate,
    }
    trainer = layout.trainer(
        folder, callbacks=[Counted(folder, every_n_minutes=every_n_minutes)], **options
    )
    trainer.fit(ToyModule(), datamodule=layout.data_module())
    return saved


def test_saves_in_time_fall_on_optimizer_steps(tmp_path: Path) -> None:
    assert run(SINGLE, _saves, tmp_path, 1e-9, 2) == [[1, 2]]  # 4 batches, 2 a step
    assert run(SINGLE, _saves, tmp_path / "never", 60.0, 1) == [[]]
    assert (tmp_path / "rescue.ckpt").is_file() and not (tmp_path / "never").exists()
    with pytest.raises(ConfigError, match="every_n_minutes is 0"):
        RescueCheckpoint(every_n_minutes=0)


def test_without_a_folder_of_their_own_checkpoints_lie_beside_the_runs(tmp_path: Path) -> None:
    """ "last" is sought before the log of this start has a folder."""
    for own in (RescueCheckpoint(), LocalCopyCheckpoint("/local", every_n_train_steps=1)):
        keep, logger = ModelCheckpoint(tmp_path / "run"), CSVLogger(tmp_path)
        trainer = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[own, keep])
        assert checkpoint_folder(own, trainer) == str(tmp_path / "run")
        trainer = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[own])
        assert checkpoint_folder(own, trainer).endswith("version_0/checkpoints")
    own, keep = (
        LocalCopyCheckpoint("/local", every_n_train_steps=1),
        ModelCheckpoint("memory://run"),
    )
    trainer = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[own, keep])
    assert checkpoint_folder(own, trainer).endswith("version_0/checkpoints")
