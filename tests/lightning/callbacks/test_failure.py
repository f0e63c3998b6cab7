"""Reports of a failing rank, and the watches that end a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from megatron_lightning.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingCheckpointError,
)
from megatron_lightning.launch.failures import report_failure
from megatron_lightning.resilience import failure_watch
from megatron_lightning.resilience.failure import Failure
from megatron_lightning.resilience.failure_watch import FailureWatch
from megatron_lightning.resilience.processes import Child, ChildWatch, kill, print_failure, wait_for
from megatron_lightning.step.agreed_stop import AgreedStop
from tests.helpers.ranks import run_ranks


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 2)


def _error(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def _lost_connection() -> ValueError:
    """As gloo says it, and as code between it and the launcher may wrap it."""
    error = _error("the checkpoint was not written")
    error.__cause__ = RuntimeError(
        "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:16581."
    )
    return error


def test_a_failure_names_rank_position_and_reason() -> None:
    error = _error("the reason\nsecond line")
    error.pipeline_position = "stage 1, action 1F0"  # type: ignore[attr-defined]
    failure = Failure.of(3, error)
    assert (
        failure.headline
        == f"rank 3 on {failure.host} failed at stage 1, action 1F0: ValueError: the reason"
    )
    assert "_error" in failure.details
    for explained in (
        ConfigError("set it to 1"),
        DataError("no such file"),
        MissingCheckpointError("no checkpoint"),
    ):
        assert Failure.of(3, explained).details == ""  # the command line promises one line


def test_what_lightning_says_of_a_setting_needs_no_traceback(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="num_nodes") as refused:
        pl.Trainer(num_nodes=0)
    for rank in (0, 1):
        assert not report_failure(FailureWatch(store, rank=rank), refused.value)
    printed = capsys.readouterr().err
    assert (
        printed.count("ValueError: `num_nodes` must be a positive integer, but got 0.") == 1
        and "Traceback" not in printed
    )


def test_the_first_report_stands(store: dist.Store, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = FailureWatch(store, rank=1), FailureWatch(store, rank=0)
    assert not first.report(_error("the cause"))
    named = r"megatron_lightning: rank 1 on \S+ failed: ValueError: the cause\n"
    assert re.fullmatch(
        rf"{named}Traceback [^\0]*ValueError: the cause\n{named}", capsys.readouterr().err
    )
    # It has an error of its own to show.
    assert not second.report(_error("a consequence"))
    printed = capsys.readouterr().err
    assert "rank 1 on" in printed and "the cause" in printed and "a consequence" not in printed
    assert second.report(_lost_connection())
    assert capsys.readouterr().err == ""


def _fail_alike(folder: str, kind: str) -> None:
    """Fail as the other ranks do, and show the error as the interpreter shows the last one of a
    program."""
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    watch = FailureWatch(dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    try:
        try:
            raise OSError(f"no space left for shard-{rank}")
        except OSError as error:
            if kind == "explained":
                raise CheckpointError(f"shard-{rank}.safetensors was not written") from error
            raise RuntimeError(f"shard {rank} is lost") from error
    except Exception as error:
        watch.report(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("explained", r"CheckpointError: shard-\d.safetensors was not written"),
        ("bug", r"RuntimeError: shard \d is lost"),
    ],
)
def test_of_ranks_that_fail_alike_one_prints_one_line_or_traceback(
    kind: str, line: str, tmp_path: Path
) -> None:
    """The line that says why comes first and last, or alone."""
    run_ranks(3, _fail_alike, str(tmp_path), kind)
    printed = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    [first] = [text for text in printed if text]  # the others are silent
    lines = first.splitlines()
    for end in (lines[0], lines[-1]):
        assert re.search(rf"^megatron_lightning: rank \d on \S+ failed: .*{line}", end), first
    # A chain of errors is one traceback.
    assert first.count("Traceback") == (0 if kind == "explained" else 2)
    assert len(lines) == 1 or kind == "bug"


def test_an_error_of_its_own_is_shown_beside_the_first(
    store: dist.Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    first, second = FailureWatch(store, rank=1), FailureWatch(store, rank=0)
    first.report(_error("the cause"))
    other = _error("another one")
    second.report(other)
    capsys.readouterr()
    sys.excepthook(type(other), other, other.__traceback__)
    assert "Traceback" in capsys.readouterr().err
    third, explained = FailureWatch(store, rank=2), ConfigError("set it to 1")
    third.report(explained)
    assert "the cause; rank 2 ends with it" in capsys.readouterr().err
    sys.excepthook(type(explained), explained, None)
    assert re.fullmatch(
        r"megatron_lightning: rank 2 on \S+ failed: \S*ConfigError: set it to 1\n",
        capsys.readouterr().err,
    )


def test_an_interruption_is_called_by_its_name_on_every_node(
    store: dist.Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FailureWatch(store, rank=1), FailureWatch(store, rank=0)
    assert not first.report(KeyboardInterrupt())
    printed = capsys.readouterr().err
    assert (
        re.search(r"rank 1 on \S+ was interrupted \(Ctrl-C or SIGINT\)\n", printed)
        and "Traceback" not in printed
    )
    assert second.report(_lost_connection()) and not capsys.readouterr().err
    monkeypatch.setattr(socket, "gethostname", lambda: "another node")
    assert FailureWatch(store, rank=2).report(_lost_connection())
    assert re.search(r"was interrupted .*; rank 2 ends with it", capsys.readouterr().err)


def test_what_all_ranks_agreed_on_is_no_failure(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report_failure(FailureWatch(store, rank=0), AgreedStop())
    assert not FailureWatch(store, rank=1).report(_error("the cause"))
    assert "the cause" in capsys.readouterr().err


def test_a_rank_that_fell_silent_is_named(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody reports anything: of four ranks, two answer."""
    watches = [
        FailureWatch(store, rank=rank, world_size=4, poll_s=0.01, grace_s=30.0, liveness_s=0.5)
        for rank in range(4)
    ]
    for watch in watches[:2]:
        watch.start()
    assert watches[0].report(_lost_connection())
    assert re.search(
        r"rank 2 on \S+ failed: it no longer answers, nor do ranks 3: its process was",
        capsys.readouterr().err,
    )
    for watch in watches:
        watch.stop()


def test_a_connection_that_broke_between_ranks_that_are_there_is_the_failure(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    watches = [
        FailureWatch(store, rank=rank, world_size=2, poll_s=0.01, grace_s=30.0) for rank in range(2)
    ]
    for watch in watches:
        watch.start()
    assert not watches[0].report(_lost_connection())
    assert re.search(
        r"rank 0 on \S+ failed: ValueError: the checkpoint was not written", capsys.readouterr().err
    )
    for watch in watches:
        watch.stop()


def test_an_error_that_only_sounds_like_a_lost_connection_is_the_failure(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the other rank nothing is heard, and nobody asks."""
    watch = FailureWatch(store, rank=0, world_size=2, liveness_s=0.2)
    assert not watch.report(RuntimeError("DataLoader timed out after 5 seconds"))
    assert re.search(
        r"rank 0 on \S+ failed: RuntimeError: DataLoader timed out", capsys.readouterr().err
    )


def test_a_failure_that_was_survived_does_not_end_the_next_run(store: dist.Store) -> None:
    for number, grace_s in ((1, 30.0), (2, 0.01)):
        watches = [FailureWatch(store, rank=rank, poll_s=0.01, grace_s=grace_s) for rank in (0, 1)]
        for watch in watches:
            watch.start()
        time.sleep(0.1)  # a report of the last run would be found here, and end this process
        for watch in watches if number == 1 else ():
            watch.report(_error("on every rank"))
        for watch in watches:
            watch.stop()


PROGRAM = """
import socket, sys, time
import torch.distributed as dist
from megatron_lightning.resilience.failure_watch import FailureWatch
socket.gethostname = lambda: "another node"
watch = FailureWatch(dist.FileStore(sys.argv[1], 2), rank=0, poll_s=0.05, grace_s=0.2)
watch.start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_another_ranks_report_ends_a_blocked_process(store: dist.Store, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    FailureWatch(store, rank=1).report(_error("the reason"))
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    # The failing rank has printed its traceback on its own node only.
    assert (
        "rank 1 on" in err
        and "ValueError: the reason" in err
        and "Traceback" in err
        and "rank 0 ends" in err
    )


LEFT_ALONE = """
import sys, time
import torch
import torch.distributed as dist
from megatron_lightning import compat
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
dist.barrier()
if sys.argv[2] == "0":
    time.sleep(60)
work = dist.all_reduce(torch.ones(3), async_op=True)
compat.abort_process_groups()
print("left", flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_without_the_ranks_that_its_collectives_wait_for(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEFT_ALONE, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        assert ranks[1].stdout is not None and ranks[1].stdout.readline() == b"left\n"
        assert ranks[1].wait(timeout=30) == 0 and ranks[0].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _child(rank: int, program: str) -> Child:
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    return Child(rank, process.pid, process.poll)


def test_a_child_that_fails_takes_the_others_along(capsys: pytest.CaptureFixture[str]) -> None:
    children = [_child(1, "import time; time.sleep(60)"), _child(2, "raise SystemExit(3)")]
    failures: list[tuple[int, str]] = []
    watch = ChildWatch(lambda: children, lambda rank, how: failures.append((rank, how)))
    watch.start()
    watch.join(timeout=10)
    assert failures == [(2, f"its process {children[1].pid} ended with exit code 3")]
    assert children[0].exit_code() == -9
    print_failure(*failures[0])
    assert "rank 2 failed: its process" in capsys.readouterr().err


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("codes", "named"), [((1, -9), 2), ((-15, 1), 2), ((-15, 1, -9), 3), ((1, 1), 1), ((0, 7), 2)]
)
def test_the_cause_is_named_among_several_ends(codes: tuple[int, ...], named: int) -> None:
    """A kill is no consequence; an error may be that of a kill; SIGTERM comes from the starter of
    the processes."""
    children = [Child(rank, 0, lambda code=code: code) for rank, code in enumerate(codes, 1)]  # type: ignore[misc]
    failures: list[int] = []
    assert ChildWatch(lambda: children, lambda rank, how: failures.append(rank)).announce()
    assert failures == [named]


def test_a_process_has_time_to_meet_the_error_that_ended_its_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of all ranks is found by one first, whose exit code and message become the job's."""
    children = [_child(1, "raise SystemExit(2)")]
    ends: list[str] = []
    watch = ChildWatch(lambda: children, lambda rank, how: None, end=lambda: ends.append("soon"))
    watch.start()
    wait_for(children, 10)
    time.sleep(1)
    watch.stop()
    watch.join(timeout=10)
    assert not ends and not watch.is_alive()

    monkeypatch.setattr("megatron_lightning.resilience.processes.GRACE_S", 0.1)
    ChildWatch(
        lambda: children, lambda rank, how: None, end=lambda: ends.append("in the end")
    ).run()
    assert ends == ["in the end"]


def test_children_that_end_well_are_left_alone() -> None:
    children = [_child(1, "pass")]
    watch = ChildWatch(lambda: children, lambda rank, how: pytest.fail("no child failed"))
    watch.start()
    watch.join(timeout=10)
    assert not watch.is_alive() and children[0].exit_code() == 0


def test_waiting_has_a_limit() -> None:
    children = [_child(1, "import time; time.sleep(60)")]
    wait_for(children, 0.1)
    assert children[0].exit_code() is None
    kill(children)
    assert children[0].exit_code() == -9
    assert children[0].describe_end(-9).endswith("was killed by SIGKILL")


def test_sigterm_finds_a_dead_rank_though_the_main_thread_is_blocked(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's agent sends it when a rank has died, and Python's handler would never run."""
    ended = threading.Event()
    FailureWatch(store, rank=0, world_size=2)  # never polls: a killed process
    watch = FailureWatch(store, rank=1, world_size=2, poll_s=0.02, grace_s=0.05, liveness_s=0.2)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with mock.patch.object(failure_watch, "end_process", lambda _: ended.set()):
            watch.start()
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(10)
            watch.stop()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert re.search(r"rank 0 on \S+ failed: it no longer answers", capsys.readouterr().err)
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor is the process's again"


def test_sigterm_ends_nobody_where_all_ranks_live(store: dist.Store) -> None:
    """One of them has left its run before the check begins."""
    left = FailureWatch(store, rank=0, world_size=2)
    left.start()
    left.stop()
    watch = FailureWatch(store, rank=1, world_size=2, poll_s=0.02, grace_s=0.05, liveness_s=0.1)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with mock.patch.object(failure_watch, "end_process") as end:
            watch.start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            watch.stop()
    finally:
        signal.signal(signal.SIGTERM, handler)
    end.assert_not_called()
