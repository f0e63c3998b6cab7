"""A rank that dies or raises ends the whole job within seconds, and the screen says which."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.faults.processes import ROOT, Ended, run_to_the_end, since_fault
from tests.helpers.slurm import two_tasks

pytestmark = pytest.mark.timeout(240)  # every process of a job imports torch and lightning anew
RAISE_S, KILL_S = 5.0, 10.0  # from the fault to the end of the job's last process, as users are promised


def run_job(start_method: str, fault: str, rank: int, launcher: tuple[str, ...] = ()) -> Ended:
    """Run a job of two ranks, one of which fails."""
    return run_to_the_end([*launcher, "-m", "tests.faults.job", start_method, fault, str(rank)])


@pytest.mark.slow  # the example of the README is such a job, and runs in the default tests
def test_all_ranks_finish_and_the_main_process_waits_for_them() -> None:
    code, output, _ = run_job("popen", "none", 0)
    assert code == 0, output
    assert re.search(r"DONE 0 16", output) and re.search(r"DONE 1 16", output), output


@pytest.mark.parametrize(
    ("start_method", "rank", "expected"),
    [
        ("popen", 1, r"rank 1 on \S+ failed: its process \d+ was killed by SIGKILL"),
        pytest.param("popen", 0, r"rank 0", marks=pytest.mark.slow),
        pytest.param("spawn", 1, r"rank 1 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("spawn", 0, r"rank 0 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("fork", 1, r"rank 1 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_job(start_method: str, rank: int, expected: str) -> None:
    code, output, elapsed_s = run_job(start_method, "kill", rank)
    assert code != 0 and elapsed_s < KILL_S, f"{elapsed_s} s\n{output}"
    assert re.search(f"megatron_lightning: {expected}", output) and "Connection closed by peer" not in output, output


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("start_method", "rank", "launcher"),
    [
        ("popen", 1, ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("popen", 0, ()), ("spawn", 1, ()), ("fork", 1, ()), ("fork", 0, ()), ("popen", 1, TORCHRUN)]
        ),
    ],
)
def test_an_exception_ends_the_job_with_its_traceback(start_method: str, rank: int, launcher: tuple[str, ...]) -> None:
    """The rank that raised shows its traceback; the other, which lost it, shows none."""
    code, output, elapsed_s = run_job(start_method, "raise", rank, launcher)
    assert code != 0 and elapsed_s < RAISE_S, f"{elapsed_s} s\n{output}"
    assert "ValueError: the injected fault" in output and "job.py" in output, output
    assert f"rank {rank} on" in output and "Connection closed by peer" not in output, output


@pytest.mark.parametrize(
    ("start_method", "fault", "rank"),
    [
        ("popen", "interrupt", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("popen", "interrupt", 0),
                ("popen", "ctrl-c", 1),
                ("spawn", "interrupt", 1),
                ("fork", "interrupt", 0),
                ("fork", "ctrl-c", 0),
            ]
        ),
    ],
)
def test_an_interrupted_job_ends_and_says_so(start_method: str, fault: str, rank: int) -> None:
    """SIGINT for one rank alone, or for all processes as a terminal sends it: Lightning's exit code, no traceback."""
    code, output, elapsed_s = run_job(start_method, fault, rank)
    assert code == 1 and elapsed_s < RAISE_S, f"{elapsed_s} s\n{output}"
    assert re.search(r"megatron_lightning: rank \d (on \S+ )?(was interrupted|failed: .* was interrupted)", output), output
    assert "Traceback" not in output and "Connection closed by peer" not in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "expected"), [(1, r"rank 1 on \S+ failed: it no longer answers"), (0, "rank 0, which keeps the job's store, has")]
)
def test_a_killed_rank_of_another_node_is_named(rank: int, expected: str) -> None:
    """Nobody watches the processes: the other rank calls the roll, or finds the store gone."""
    command = [sys.executable, "-m", "tests.faults.job", "popen", "kill", str(rank), "1", "2"]
    tasks = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **task}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for task in two_tasks()
    ]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    elapsed_s = since_fault("\n".join(outputs))
    assert tasks[rank].returncode == -9 and tasks[1 - rank].returncode == 1 and elapsed_s < KILL_S, f"{elapsed_s} s\n{outputs}"
    assert re.search(f"megatron_lightning: {expected}", outputs[1 - rank]) and "Traceback" not in outputs[1 - rank], outputs


def test_an_exception_in_a_stage_is_named_with_its_place_in_the_schedule() -> None:
    """Two chunks a rank: the first layer of rank 1 is stage 0."""
    code, output, elapsed_s = run_job("popen", "stage", 1)
    assert code != 0 and elapsed_s < RAISE_S, f"{elapsed_s} s\n{output}"
    place = r"rank 1 \(pp rank 1\) was at stage 0, action 0F1, micro-batch 1"
    assert re.search(f"rank 1 on .* failed at {place}: ValueError: the injected fault", output), output
