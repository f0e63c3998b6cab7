"""Stops on request: Slurm's signal without any callback, a stop file, a time; what scripts can
read."""

from __future__ import annotations

import json
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment

from megatron_lightning.callbacks import RescueCheckpoint
from megatron_lightning.checkpoint import is_committed
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience import exit_codes
from megatron_lightning.resilience.failure import Failure
from megatron_lightning.resilience.lifecycle import stop_requests
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import DP2, ONE, PP2, TP2_PP2, Layout, layouts, run

STOP = 3


class _Signaled(pl.Callback):
    """Sends the requeue signal to the last rank in the middle of a step, between two others'
    messages."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def _fit(layout: Layout, folder: str, *callbacks: pl.Callback, **more: Any) -> dict[str, Any]:
    record, module = Losses(), ToyModule()
    trainer = layout.trainer(
        folder,
        callbacks=[record, *callbacks],
        max_epochs=2,
        enable_checkpointing=any(isinstance(c, RescueCheckpoint) for c in callbacks),
        **more,
    )
    code, before = None, list(trainer.callbacks)
    path = "last" if trainer.checkpoint_callbacks else None
    try:
        trainer.fit(module, datamodule=layout.data_module(), ckpt_path=path)
    except SystemExit as end:
        code = end.code
    if dist.is_initialized():  # rank 0 has written its record
        dist.barrier()
    return {
        "code": code,
        "losses": record.losses,
        "weights": [p.detach().clone() for p in module.parameters()],
        "same callbacks": trainer.callbacks == before,
    }


def _fake_slurm(folder: str) -> list[Any]:
    is_several = dist.is_initialized()
    rank = str(dist.get_rank()) if is_several else "0"
    ranks = str(dist.get_world_size()) if is_several else "1"
    tool = Path(folder, "bin", "scontrol")
    tool.parent.mkdir(parents=True, exist_ok=True)
    if rank == "0":
        tool.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
        tool.chmod(0o755)
    os.environ.update(
        SLURM_JOB_ID="17",
        SLURM_NTASKS=ranks,
        SLURM_NTASKS_PER_NODE=ranks,
        SLURM_JOB_NAME="train",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        PATH=f"{tool.parent}:{os.environ['PATH']}",
    )
    return [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]


def _requeued(layout: Layout, folder: str) -> dict[str, Any]:
    whole = _fit(layout, f"{folder}/whole")
    first = _fit(layout, folder, _Signaled(STOP), plugins=_fake_slurm(folder))
    record = json.loads(Path(folder, "stopped.json").read_text())
    rest = _fit(layout, folder, plugins=_fake_slurm(folder))
    return {
        "code": (first["code"], rest["code"]),
        "steps": (len(first["losses"]), len(rest["losses"])),
        "losses": first["losses"] + rest["losses"] == whole["losses"],
        "weights": all(map(torch.equal, whole["weights"], rest["weights"])),
        "callbacks": first["same callbacks"] and rest["same callbacks"],
        "record": (record["reason"], Path(record["checkpoint"]).name, record["global_step"]),
        "removed": not Path(folder, "stopped.json").exists(),
    }


@layouts(ONE, slow=[PP2, DP2, TP2_PP2])
def test_slurms_signal_saves_and_requeues_without_a_callback(
    layout: Layout, tmp_path: Path
) -> None:
    # Ranks that run_ranks starts are, for exit codes, as under torchrun.
    code = exit_codes.STOPPED if layout.ranks == 1 else exit_codes.FINISHED
    for rank in run(layout, _requeued, tmp_path):
        assert rank == {
            "code": (code, None),
            "steps": (STOP, 8 - STOP),
            "losses": True,
            "weights": True,
            "callbacks": True,
            "record": ("requeue", "hpc_ckpt_1.ckpt", STOP),
            "removed": True,
        }
    assert is_committed(tmp_path / "hpc_ckpt_1.ckpt")
    assert (tmp_path / "calls").read_text() == "requeue 17\n"


class _Touch(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STOP and trainer.is_global_zero:
            self.path.touch()


def _asked(layout: Layout, folder: str, how: str) -> dict[str, Any]:
    stop = Path(folder, "STOP")
    whole = _fit(layout, f"{folder}/whole")
    options: dict[str, Any] = {
        "file": {"stop_file": stop},
        "time": {"exit_after": timedelta(microseconds=1)},
        "time, code 0": {"exit_after": timedelta(microseconds=1), "exit_code": 0},
    }[how]
    rescue = RescueCheckpoint(folder, **options)
    with mock.patch.object(stop_requests, "_FILE_POLL_S", 0.0):  # this run takes less than a second
        first = _fit(layout, folder, *([_Touch(stop)] if how == "file" else []), rescue)
    record = json.loads(Path(folder, "stopped.json").read_text())
    rest = _fit(layout, folder, RescueCheckpoint(folder))
    return {
        "code": first["code"],
        "losses": first["losses"] + rest["losses"] == whole["losses"],
        "reason": record["reason"],
        "checkpoint": record["checkpoint"] == str(Path(folder, "rescue.ckpt")),
        "exit code": record["exit_code"] == first["code"],
        "removed": not stop.exists(),
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("how", "code"), [("file", 75), ("time", 75), ("time, code 0", 0)], ids=["file", "time", "code"]
)
def test_a_file_or_a_time_stops_the_run_saved(how: str, code: int, tmp_path: Path) -> None:
    (rank,) = run(ONE, _asked, tmp_path, how)
    assert rank == {
        "code": code,
        "losses": True,
        "reason": "stop_file" if how == "file" else "exit_after",
        "checkpoint": True,
        "exit code": True,
        "removed": True,
    }


@pytest.mark.slow
@layouts(PP2, DP2, TP2_PP2)
@pytest.mark.parametrize("how", ["file", "time"])
def test_rank_0s_file_and_clock_stop_all_ranks(how: str, layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _asked, tmp_path, how):
        assert rank["code"] == 0 and rank["losses"] and rank["checkpoint"]


def test_a_time_that_is_over_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exit_after is 0:00:00\. Set it to a positive time"):
        RescueCheckpoint(exit_after=timedelta(0))


class _Terminated(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_message_of_a_stop_names_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = tmp_path / "STOP"
    for callback, request in ((_Terminated(), "SIGTERM"), (_Touch(stop), f"the file {stop}")):
        folder = tmp_path / type(callback).__name__
        rescue = RescueCheckpoint(dirpath=folder, stop_file=stop)
        runner = trainer(
            MegatronStrategy(),
            callbacks=[callback, rescue],
            max_epochs=100_000,  # a stop file is looked for once a second
            enable_checkpointing=True,
            default_root_dir=folder,
        )
        with pytest.raises(SystemExit) as end:
            runner.fit(ToyModule(), datamodule=ToyData())
        assert end.value.code == exit_codes.STOPPED
        step = STOP if request == "SIGTERM" else runner.global_step
        assert (
            f"megatron_lightning: {request}: the run ends at step {step}, with "
            f"{rescue.last_model_path}, with exit code 75\n"
        ) in capsys.readouterr().err


def test_every_end_of_a_run_removes_the_stop_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that came with a signal, or in the last moment, would stop the next start."""
    stop = tmp_path / "STOP"
    rescue = RescueCheckpoint(dirpath=tmp_path, stop_file=stop)
    runner = trainer(
        MegatronStrategy(),
        callbacks=[_Terminated(), _Touch(stop), rescue],
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    with pytest.raises(SystemExit):
        runner.fit(ToyModule(), datamodule=ToyData())
    # A person's file outranks SIGTERM, after which scripts start the job again.
    assert f"the file {stop}: the run ends at step {STOP}" in capsys.readouterr().err
    assert not stop.exists()
    stop.touch()
    rescue.on_train_end(runner, runner.lightning_module)
    assert not stop.exists()


def test_a_report_names_the_signal_behind_an_exception() -> None:
    for exception, name in (
        (KeyboardInterrupt(), "Ctrl-C or SIGINT"),
        (SystemExit(exit_codes.TERMINATED), "SIGTERM"),
    ):
        report = Failure.of(1, exception)
        assert re.fullmatch(rf"rank 1 on \S+ was interrupted \({name}\)", report.text)
    assert "failed" in Failure.of(1, SystemExit(1)).headline
