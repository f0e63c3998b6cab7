"""A rank that dies or raises ends the whole job within seconds, the screen says which, and nothing
written is lost.

The default test tries a killed rank under our own launcher. The slow ones try all faults under all
launchers.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megatron_lightning.strategies import MegatronStrategy
from tests.faults.processes import ROOT, Ended, run_to_the_end, since_fault
from tests.helpers.ranks import run_ranks
from tests.helpers.slurm import two_tasks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

pytestmark = pytest.mark.timeout(240)  # every process of a job imports torch and lightning
# From the fault to the end of the job's last process, as users are promised.
RAISE_S, KILL_S = 5.0, 10.0
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = ("popen", "spawn", "fork", "torchrun", "agents")
LOST = "Connection closed by peer"


def run_job(launcher: str, fault: str, rank: int, folder: Path | None = None) -> Ended:
    """Run a job of two ranks, one of which fails."""
    start_method = launcher if launcher in ("spawn", "fork") else "popen"
    per_node = ["1", "2"] if launcher == "agents" else ["2", "1"]
    job = [
        "tests.faults.job",
        start_method,
        fault,
        str(rank),
        *per_node,
        *([] if folder is None else [str(folder)]),
    ]
    first = {"torchrun": [*TORCHRUN, "-m"], "agents": ["-m", "tests.faults.two_agents"]}.get(
        launcher, ["-m"]
    )
    ended = run_to_the_end([*first, *job])
    # By a thread of gloo that meets the interpreter's end.
    assert "terminate called" not in ended.output, ended.output
    return ended


def on_all_launchers(*default: tuple[str, int]) -> Any:
    """Run a test with each launcher and failing rank; only the ``default`` ones are not slow."""
    cases = [(launcher, rank) for launcher in LAUNCHERS for rank in (1, 0)]
    marks = [() if case in default else (pytest.mark.slow,) for case in cases]
    return pytest.mark.parametrize(
        ("launcher", "rank"),
        [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)],
    )


def assert_nothing_lost(ended: Ended, launcher: str, ranks: set[int]) -> None:
    """All that was printed is there, and what was registered for the end has run; a forked process
    runs nothing of it."""
    assert {int(rank) for rank in re.findall(r"WRITTEN (\d)", ended.output)} == ranks, ended.output
    if launcher != "fork":
        assert {
            int(rank) for rank in re.findall(r"REGISTERED IN TRAINING (\d)", ended.output)
        } == ranks, ended.output
    if launcher in ("popen", "torchrun", "agents"):
        assert ended.output.count("REGISTERED AT FIRST") == len(ranks), ended.output


@pytest.mark.slow  # the example of the README is such a job, and runs in the default tests
def test_all_ranks_finish_and_the_main_process_waits_for_them() -> None:
    code, output, _ = run_job("popen", "none", 0)
    assert code == 0, output
    assert re.search(r"DONE 0 16", output) and re.search(r"DONE 1 16", output), output


@on_all_launchers()  # test_restarts_in_process has exceptions, test_pipeline_faults their place
def test_an_exception_in_a_stage_ends_the_job_with_its_place_in_the_schedule(
    launcher: str, rank: int, tmp_path: Path
) -> None:
    """Two chunks a rank: the first layer of rank 1 is stage 0. The other rank, which lost it, shows
    no traceback."""
    ended = run_job(launcher, "stage", rank, tmp_path)
    assert ended.code != 0 and ended.elapsed_s < RAISE_S, f"{ended.elapsed_s} s\n{ended.output}"
    stage = 1 - rank
    place = rf"rank {rank} \(pp rank {rank}\) was at stage {stage}, action {stage}F1, micro-batch 1"
    assert re.search(
        f"rank {rank} on .* failed at {place}: ValueError: the injected fault", ended.output
    ), ended.output
    assert "job.py" in ended.output and LOST not in ended.output, ended.output
    assert_nothing_lost(ended, launcher, {0, 1})
    assert logged_steps(tmp_path) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_torchrun_starts_a_job_again_whose_rank_was_killed(rank: int, tmp_path: Path) -> None:
    """The ranks that are left name it and end, rank 0's too: they wait in a collective, where no
    Python handler of the agent's SIGTERM runs."""
    torchrun = [*TORCHRUN[:3], "--nproc-per-node=4", "--max-restarts=1", "-m"]
    ended = run_to_the_end([*torchrun, "tests.faults.job", "popen", "kill", str(rank), "4", "1",
                            str(tmp_path)])  # fmt: skip
    assert ended.code == 0 and ended.output.count("DONE") == 4, ended.output
    assert f"rank {rank} on " in ended.output and "no longer answers" in ended.output, ended.output
    assert "SIGKILL, sending" not in ended.output, "torchrun waited for 30 s, and killed the rest"


def logged_steps(folder: Path) -> list[int]:
    """Return the steps whose losses the job's logger has written."""
    with open(folder / "lightning_logs" / "version_0" / "metrics.csv") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train_loss_step"]]


@on_all_launchers(("popen", 1))
def test_a_killed_rank_ends_the_job_whose_last_checkpoint_resumes(
    launcher: str, rank: int, tmp_path: Path
) -> None:
    ended = run_job(launcher, "kill", rank, tmp_path)
    assert ended.code != 0 and ended.elapsed_s < KILL_S, f"{ended.elapsed_s} s\n{ended.output}"
    named = (
        rf"rank {rank} (on \S+ )?failed: (its )?process \d+|rank +: {rank} |rank {rank}, which "
        r"keeps the job's store, has ended"
    )
    assert re.search(named, ended.output), ended.output
    # Nobody saw it.
    assert re.search(r"SIGKILL|exitcode +: -9", ended.output) or (launcher, rank) == ("popen", 0), (
        ended.output
    )
    assert LOST not in ended.output, ended.output
    assert run_ranks(2, steps_gone_on, str(tmp_path / "last.ckpt")) == [list(range(3, 17))] * 2


def steps_gone_on(checkpoint: str) -> list[int]:
    """Resume from a checkpoint; return the steps that are trained."""
    steps: list[int] = []
    record = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: steps.append(trainer.global_step)
    )
    fit = trainer(
        MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=2),
        max_epochs=2,
        callbacks=[record],
    )
    fit.fit(ToyModule(), datamodule=ToyData(), ckpt_path=checkpoint)
    return steps


@pytest.mark.parametrize("fault", ["interrupt", "ctrl-c"])
@on_all_launchers()
def test_an_interrupted_job_ends_and_says_so(
    launcher: str, rank: int, fault: str, tmp_path: Path
) -> None:
    """SIGINT for one rank alone, or for all processes as a terminal sends it: the code of an
    interruption where the main process is a rank, no traceback of ours."""
    ended = run_job(launcher, fault, rank, tmp_path)
    is_main = launcher == "popen" and (fault == "ctrl-c" or rank == 0)
    assert ended.code == (130 if is_main else 1) and ended.elapsed_s < RAISE_S, (
        f"{ended.elapsed_s} s\n{ended.output}"
    )
    said = r"megatron_lightning: rank \d (on \S+ )?(was interrupted|failed: .* was interrupted)"
    assert re.search(said, ended.output) and LOST not in ended.output, ended.output
    if launcher in ("popen", "spawn", "fork"):  # torchrun shows one of its own
        assert "Traceback" not in ended.output, ended.output


@on_all_launchers()
def test_a_terminated_rank_waits_for_nobody(launcher: str, rank: int, tmp_path: Path) -> None:
    """Lightning's handler would broadcast in the middle of the step."""
    ended = run_job(launcher, "terminate", rank, tmp_path)
    assert ended.code != 0 and ended.elapsed_s < RAISE_S, f"{ended.elapsed_s} s\n{ended.output}"
    assert "Received SIGTERM" in ended.output, ended.output
    assert re.search(r"rank \d on \S+ was interrupted \(SIGTERM\)", ended.output), ended.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_no_exception_reaches_is_ended_and_loses_nothing(
    launcher: str, tmp_path: Path
) -> None:
    """The main thread of rank 0, which logs, hangs."""
    ended = run_job(launcher, "hang", 1, tmp_path)
    assert ended.code != 0 and ended.elapsed_s < RAISE_S, f"{ended.elapsed_s} s\n{ended.output}"
    assert re.search(r"rank 1 on \S+ failed: ValueError: the injected fault", ended.output), (
        ended.output
    )
    assert_nothing_lost(ended, launcher, {0, 1})
    assert logged_steps(tmp_path) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill", "interrupt", "hang"])
@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_the_process_that_started_workers_outlives_them(launcher: str, fault: str) -> None:
    """A notebook, say."""
    ended = run_job(launcher, f"{fault}+caught", 1)
    assert ended.code == 0 and "GOES ON" in ended.output and "DONE 0 0" in ended.output, (
        ended.output
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (1, r"rank 1 on \S+ failed: it no longer answers"),
        (0, "rank 0, which keeps the job's store, has"),
    ],
)
def test_a_killed_rank_of_another_node_is_named(rank: int, expected: str) -> None:
    """Nobody watches the processes: the other rank calls the roll, or finds the store gone."""
    command = [sys.executable, "-m", "tests.faults.job", "popen", "kill", str(rank), "1", "2"]
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **task},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in two_tasks()
    ]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    elapsed_s = since_fault("\n".join(outputs))
    assert (
        tasks[rank].returncode == -9 and tasks[1 - rank].returncode == 1 and elapsed_s < KILL_S
    ), f"{elapsed_s} s\n{outputs}"
    assert (
        re.search(f"megatron_lightning: {expected}", outputs[1 - rank])
        and "Traceback" not in outputs[1 - rank]
    ), outputs
