"""The launcher of a command's processes, by the variables of torchrun and Slurm."""

from __future__ import annotations

import pytest

from megatron_lightning.resilience.launcher import find, first_host


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n[01-04,7],m1", "n01"), ("a,b", "a"), ("gpu-[3]-eth", "gpu-3-eth")],
)
def test_slurms_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_launchers_are_found_by_their_variables() -> None:
    slurm = {
        "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40017",
        "SLURM_STEP_NODELIST": "n[2-3]",
    }  # fmt: skip
    assert find(slurm) == ("Slurm", 3, 8, 1, "tcp://n2:15017")
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **slurm}
    assert find(torchrun) == ("torchrun", 1, 4, 1, "env://")
    assert find({**slurm, "SLURM_NTASKS": "1"}) is None


def test_torchrun_wins_over_slurm_and_a_step_over_its_job() -> None:
    job = {"SLURM_NTASKS": "8", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n1"}
    inside = find({**job, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"})
    assert inside is not None and inside[:4] == ("torchrun", 2, 4, 2)
    step = find({**job, "SLURM_STEP_NUM_TASKS": "2"})
    assert step is not None and (step.name, step.world_size) == ("Slurm", 2)
    assert find({**job, "SLURM_STEP_NUM_TASKS": "1"}) is None
