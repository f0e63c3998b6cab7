"""The job scripts of ``examples/cluster`` on a real Slurm, of two simulated nodes on this machine:
``pytest -m slow tests/faults/test_slurm.py``. Skipped where Slurm is not installed.

Every job ends finished, with the losses and samples of an undisturbed job, bit by bit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster_job import rescue, write_recipe
from tests.faults.forty import values
from tests.faults.processes import ROOT
from tests.helpers.slurm import free_port
from tests.helpers.slurm_cluster import Cluster, Job, slurm_cluster, why_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_missing() is not None, reason=f"no Slurm: {why_missing()}"),
    pytest.mark.timeout(900),  # every process of a job imports torch and lightning
]
SCRIPTS = ROOT / "examples" / "cluster"
START_S, END_S = 300.0, 300.0
TP2_DP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LIMIT_MINUTES = 2
"""Of a job whose steps have begun. Slurm looks at limits every 30 seconds."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with slurm_cluster() as cluster:
        programs = str(Path(sys.executable).parent)
        cluster.environment["PATH"] = f"{programs}:{cluster.environment['PATH']}"
        cluster.environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        cluster.environment["OMP_NUM_THREADS"] = "1"
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(
    slurm: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[tuple[str, int, int], set[str]]]:
    """Losses and samples of jobs that nothing disturbs, which end with code 0."""
    found = {}
    for name, strategy, tasks in (("tp2-dp2", TP2_DP2, 2), ("pp2", PP2, 1)):
        folder = tmp_path_factory.mktemp(name)
        job = submit(slurm, folder, tasks=tasks, strategy=strategy, steps=30)
        assert job.wait(START_S + END_S) == ("COMPLETED", 0), job.output
        found[name] = values(job.output)
        assert len(found[name]) == 2 * 2 * tasks * 30, job.output
    return found


def submit(
    slurm: Cluster,
    folder: Path,
    *arguments: str,
    script: str = "slurm.sbatch",
    tasks: int = 1,
    options: tuple[str, ...] = (),
    **recipe: Any,
) -> Job:
    """Submit a script with a recipe for two nodes with ``tasks`` ranks each."""
    path = write_recipe(folder, num_nodes=2, devices=tasks, **recipe)
    with_torchrun = script == "slurm_torchrun.sbatch"
    variables = {"GPUS_PER_NODE": str(tasks), "MASTER_PORT": free_port()} if with_torchrun else {}
    return slurm.submit(
        SCRIPTS / script,
        "--config",
        str(path),
        *arguments,
        output=folder / "output",
        options=(
            "--nodes=2",
            f"--ntasks-per-node={1 if with_torchrun else tasks}",
            "--gpus-per-node=0",
            *options,
        ),
        variables=variables,
    )


def assert_equal(job: Job, expected: dict[tuple[str, int, int], set[str]], steps: int) -> None:
    """All steps and samples, once or again with equal bits."""
    found = values(job.output)
    # The samples of a step carry the number of steps before it.
    wanted = {
        key: value for key, value in expected.items() if key[2] <= steps - (key[0] == "SAMPLES")
    }
    different = {key: (found.get(key), v) for key, v in wanted.items() if found.get(key) != v}
    assert not different, f"{different}\n{job.output}"


def stopped(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "stopped.json").read_text())
    return record


def at_step(job: Job, step: int) -> None:
    job.wait_for(rf"LOSS 0 {step} ", START_S)


def test_the_requeue_signal_saves_and_requeues_without_any_callback(
    slurm: Cluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """TP 2 x DP 2: the signal finds ranks inside of collectives of both axes."""
    job = submit(slurm, tmp_path, tasks=2, strategy=TP2_DP2, steps=30, pause_s=0.3)
    at_step(job, 3)
    job.signal("USR1")
    job.wait_for_requeue(30)
    record = stopped(tmp_path)
    assert (record["reason"], record["exit_code"]) == ("requeue", 75), record
    assert Path(record["checkpoint"]).name == "hpc_ckpt_1.ckpt", record
    job.start_now()
    assert job.wait(START_S + END_S) == ("COMPLETED", 0), job.output
    assert_equal(job, undisturbed["tp2-dp2"], 30)
    assert_none_lost(job, record["global_step"])


def assert_none_lost(job: Job, step: int) -> None:
    """No step was trained twice."""
    losses = [line for line in job.output.splitlines() if line.startswith(f"LOSS 0 {step} ")]
    assert len(losses) == 1, job.output


def test_a_time_limit_requeues(slurm: Cluster, tmp_path: Path) -> None:
    options = ("--time=60", "--signal=SIGUSR1@90")
    job = submit(slurm, tmp_path, strategy=PP2, steps=30, pause_s=8.0, options=options)
    at_step(job, 2)
    shorten(job)
    job.wait_for_requeue(150)
    record = stopped(tmp_path)
    assert record["reason"] == "requeue", record
    job.update(TimeLimit="60")
    job.start_now()
    at_step(job, record["global_step"] + 1)
    # Enough: the rest is as slow.
    assert_none_lost(job, record["global_step"])
    slurm.call("scancel", str(job.number))


def shorten(job: Job) -> None:
    """Set the job's limit to a time that is near. Slurm sends its signal before the limit."""
    hours, minutes, _ = (int(part) for part in job.field("RunTime").split(":"))
    job.update(TimeLimit=str(hours * 60 + minutes + LIMIT_MINUTES))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_by_srun(
    rank: int, slurm: Cluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, strategy=PP2, steps=8, fault="kill", rank=rank)
    assert job.wait(2 * START_S) == ("COMPLETED", 0), job.output
    assert job.output.count("FAULT ") == 1 and job.output.count("RANK ") == 4, job.output
    assert_equal(job, undisturbed["pp2"], 8)


def test_torchruns_agents_start_the_ranks_again(
    slurm: Cluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = submit(
        slurm, tmp_path, script="slurm_torchrun.sbatch", strategy=PP2, steps=8, fault="kill",
    )  # fmt: skip
    assert job.wait(2 * START_S) == ("COMPLETED", 0), job.output
    assert job.output.count("FAULT ") == 1 and job.output.count("RANK ") == 4, job.output
    assert_equal(job, undisturbed["pp2"], 8)


def test_torchruns_job_is_queued_again_at_its_limit(slurm: Cluster, tmp_path: Path) -> None:
    """By SIGTERM, since Lightning handles no signal of Slurm under torchrun."""
    job = submit(
        slurm, tmp_path, script="slurm_torchrun.sbatch", strategy=PP2, steps=30, pause_s=8.0,
        options=("--time=60", "--signal=SIGTERM@90"), callbacks=(rescue(tmp_path),),
    )  # fmt: skip
    at_step(job, 2)
    shorten(job)
    job.wait_for_requeue(150)
    record = stopped(tmp_path)
    assert (record["reason"], record["exit_code"]) == ("sigterm", 0), record
    job.update(TimeLimit="60")
    job.start_now()
    at_step(job, record["global_step"] + 1)
    assert_none_lost(job, record["global_step"])
    slurm.call("scancel", str(job.number))


def test_codes_end_a_job_or_queue_it_again(slurm: Cluster, tmp_path: Path) -> None:
    """Wrong settings, a verdict, a stop file, and SIGTERM, all beside each other."""
    folders = {name: tmp_path / name for name in ("wrong", "verdict", "file", "sigterm")}
    for folder in folders.values():
        folder.mkdir()
    wrong = submit(slurm, folders["wrong"], strategy={"tensor_model_parallel_size": 3})
    verdict = {"class_path": "tests.faults.cluster_job.Verdict"}
    judged = submit(slurm, folders["verdict"], strategy=PP2, callbacks=(verdict,))
    stop = rescue(folders["file"], stop_file=str(folders["file"] / "STOP"))
    asked = submit(slurm, folders["file"], strategy=PP2, steps=300, pause_s=0.5, callbacks=(stop,))
    assert wrong.wait(START_S) == ("FAILED", 2), wrong.output
    assert judged.wait(START_S) == ("FAILED", 16), judged.output
    at_step(asked, 2)
    (folders["file"] / "STOP").touch()
    assert asked.wait(60) == ("COMPLETED", 0), asked.output
    assert stopped(folders["file"])["exit_code"] == 75 and asked.field("Restarts") == "0"
    ended = submit(
        slurm, folders["sigterm"], strategy=PP2, steps=300, pause_s=0.5,
        callbacks=(rescue(folders["sigterm"]),),
    )  # fmt: skip
    at_step(ended, 2)
    ended.signal("TERM")
    ended.wait_for_requeue(60)
    assert stopped(folders["sigterm"])["reason"] == "sigterm"
    slurm.call("scancel", str(ended.number))
