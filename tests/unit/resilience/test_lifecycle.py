"""Requests to stop and records of starts, without a Trainer."""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.errors import NoProgressError
from megatron_lightning.resilience.lifecycle import stop_record
from megatron_lightning.resilience.lifecycle.start_record import (
    StartRecord,
    check_progress,
    read_record,
)
from megatron_lightning.resilience.lifecycle.stop_record import (
    remove_stop,
    requeue_job,
    write_stop,
)
from megatron_lightning.resilience.lifecycle.stop_requests import Reason, StopRequests


def _requests(file: Path | None = None, exit_after: timedelta | None = None) -> StopRequests:
    return StopRequests(handles_sigterm=True, stop_file=file, exit_after=exit_after)


def test_a_file_outranks_signals_and_is_looked_for_every_second(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    requests = _requests(file)
    assert requests.current(is_first=True) is Reason.NONE
    file.touch()
    requests.record_signal(signal.SIGTERM)
    assert requests.current(is_first=True) is Reason.SIGTERM  # within the second
    requests.look_again()
    assert requests.current(is_first=False) is Reason.SIGTERM
    assert requests.current(is_first=True) is Reason.STOP_FILE
    assert requests.describe(Reason.STOP_FILE, None) == f"the file {file}"
    requests.remove_file()
    requests.forget()
    requests.look_again()
    assert requests.current(is_first=True) is Reason.NONE


def test_the_clock_is_rank_0s_and_signals_are_recorded_until_handlers_are_restored() -> None:
    late = _requests(exit_after=timedelta(0))
    assert late.current(is_first=True) is Reason.EXIT_AFTER
    assert late.current(is_first=False) is Reason.NONE
    before = signal.getsignal(signal.SIGTERM)
    requests = _requests()
    requests.install_handlers(signal.SIGUSR1)
    try:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        requests.restore_handlers()
    assert requests.current(is_first=False) is Reason.REQUEUE
    assert requests.describe(Reason.REQUEUE, signal.SIGUSR1).startswith("SIGUSR1, Slurm's signal")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_is_recorded_and_slurm_queues_an_element_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stop(tmp_path / "new", Reason.REQUEUE, checkpoint="a.ckpt", step=3, exit_code=75)
    [file] = (tmp_path / "new").iterdir()
    assert json.loads(file.read_text()) == {
        "reason": "requeue", "checkpoint": "a.ckpt", "global_step": 3, "exit_code": 75
    }  # fmt: skip
    remove_stop(tmp_path / "new")
    remove_stop(tmp_path / "new")
    assert not file.exists()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    commands: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        raise FileNotFoundError("no scontrol")

    monkeypatch.setattr(stop_record.subprocess, "run", run)
    with pytest.warns(UserWarning, match=r"job 7_2 is saved .*no scontrol"):
        requeue_job()
    assert commands == [["scontrol", "requeue", "7_2"]]


def test_starts_are_recorded_and_a_repeated_failure_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_record(tmp_path) == {}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    starts: list[Any] = []
    for number in range(3):
        record = StartRecord(tmp_path, starts, 4, run="id", loggers=[])
        record.beat(5)
        record.beat(6)  # within the second
        assert read_record(tmp_path)["starts"][-1]["reached_step"] == 5
        record.note(7)
        starts = read_record(tmp_path)["starts"]
        assert [s["reached_step"] for s in starts] == [7] * (number + 1)
    with pytest.raises(NoProgressError, match="3 times from step 4 and ended at step 7"):
        check_progress(starts)
    starts[0]["reached_step"] = 5
    check_progress(starts)
    next(tmp_path.iterdir()).write_text("{")
    assert read_record(tmp_path) == {}
