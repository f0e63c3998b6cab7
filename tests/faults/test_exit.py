"""A job that has trained to its end ends with exit code 0, and no thread of a process group
outlives its main thread."""

from __future__ import annotations

import pytest

from tests.faults.processes import run_to_the_end

pytestmark = pytest.mark.timeout(240)  # every process of a job imports torch and lightning
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow  # the example of the README leaves groups behind as well, in the usual run
@pytest.mark.parametrize(
    ("launcher", "data_parallel"),
    [
        ("popen", "zero1"),
        ("popen", "fsdp"),
        ("torchrun", "ddp"),
        ("spawn", "zero1"),
        ("fork", "zero1"),
    ],
)
def test_no_thread_of_a_group_meets_the_interpreter_s_end(
    launcher: str, data_parallel: str
) -> None:
    start_method = launcher if launcher in ("spawn", "fork") else "popen"
    first = [*TORCHRUN, "-m"] if launcher == "torchrun" else ["-m"]
    code, output, _ = run_to_the_end([*first, "tests.faults.ending", start_method, data_parallel])
    assert code == 0 and "terminate called" not in output, output
    assert output.count("LEFT 0\n") == 2 and "DONE" in output, output
