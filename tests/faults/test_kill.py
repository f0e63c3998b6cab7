"""A rank that dies or raises ends the whole job within seconds, and the screen says which."""

from __future__ import annotations

import re

import pytest

from tests.faults.processes import Ended, run_to_the_end

pytestmark = pytest.mark.timeout(240)  # every process of a job imports torch and lightning anew
LIMIT_S = 10.0  # from the fault to the end of the job's last process, as users are promised


def run_job(start_method: str, fault: str, rank: int) -> Ended:
    """Run a job of two ranks, one of which fails."""
    return run_to_the_end(["-m", "tests.faults.job", start_method, fault, str(rank)])


@pytest.mark.slow  # the example of the README is such a job, and runs in the default tests
def test_all_ranks_finish_and_the_main_process_waits_for_them() -> None:
    code, output, _ = run_job("popen", "none", 0)
    assert code == 0, output
    assert re.search(r"DONE 0 16", output) and re.search(r"DONE 1 16", output), output


@pytest.mark.parametrize(
    ("start_method", "rank", "expected"),
    [
        ("popen", 1, r"rank 1 failed: its process \d+ was killed by SIGKILL"),
        pytest.param("popen", 0, r"rank 0", marks=pytest.mark.slow),
        pytest.param("spawn", 1, r"rank 1 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("spawn", 0, r"rank 0 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("fork", 1, r"rank 1 failed: its process \d+ was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_job(start_method: str, rank: int, expected: str) -> None:
    code, output, elapsed_s = run_job(start_method, "kill", rank)
    assert code != 0 and elapsed_s < LIMIT_S, f"{elapsed_s} s\n{output}"
    assert re.search(f"megatron_lightning: {expected}", output), output


@pytest.mark.parametrize(
    ("start_method", "rank"),
    [("popen", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("popen", 0), ("spawn", 1), ("fork", 1)])],
)
def test_an_exception_ends_the_job_with_its_traceback(start_method: str, rank: int) -> None:
    code, output, elapsed_s = run_job(start_method, "raise", rank)
    assert code != 0 and elapsed_s < LIMIT_S, f"{elapsed_s} s\n{output}"
    assert "ValueError: the injected fault" in output and "job.py" in output, output
    assert f"rank {rank} on" in output, output


def test_an_exception_in_a_stage_is_named_with_its_place_in_the_schedule() -> None:
    """Two chunks a rank: the first layer of rank 1 is stage 0."""
    code, output, elapsed_s = run_job("popen", "stage", 1)
    assert code != 0 and elapsed_s < LIMIT_S, f"{elapsed_s} s\n{output}"
    place = r"rank 1 \(pp rank 1\) was at stage 0, action 0F1, micro-batch 1"
    assert re.search(f"rank 1 on .* failed at {place}: ValueError: the injected fault", output), output
