"""Scripts for clusters, with programs in the place of Slurm's that record how they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def _run(script: str, folder: Path, srun: str, *, requeue_code: int = 0) -> tuple[int, list[str]]:
    """Run a script; ``srun`` is what its program does, with $n, the number of the call."""
    tools = folder / "bin"
    tools.mkdir()
    programs = {
        "srun": f'echo "srun $@" >> {folder}/calls\nn=$(grep -c ^srun {folder}/calls)\n{srun}',
        "scontrol": (
            f'[ "$1" = show ] && echo node1 && exit\n'
            f'echo "scontrol $@" >> {folder}/calls; exit {requeue_code}'
        ),
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "ROOT": str(folder),
    }
    command = ["bash", str(CLUSTER / script), "--config", "a.yaml"]
    code = subprocess.run(command, env=environment, timeout=60, check=False).returncode
    return code, [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def _says(folder: Path, reason: str) -> str:
    return f'echo \'{{"reason": "{reason}"}}\' > {folder}/stopped.json'


@pytest.mark.parametrize("code", [0, 2, 16, 17, 130])
def test_codes_that_end_a_job_end_it(code: int, tmp_path: Path) -> None:
    assert _run("slurm.sbatch", tmp_path, f"exit {code}") == (code, ["srun"])


@pytest.mark.parametrize(
    ("reason", "calls"),
    [("stop_file", ["srun"]), ("requeue", ["srun"]), ("sigterm", ["srun", "scontrol"])],
)
def test_a_stop_on_request_is_queued_again_unless_a_person_asked(
    reason: str, calls: list[str], tmp_path: Path
) -> None:
    assert _run("slurm.sbatch", tmp_path, f"{_says(tmp_path, reason)}; exit 75") == (0, calls)


def test_a_failure_is_started_again_while_steps_are_gained(tmp_path: Path) -> None:
    gains = f'echo "  \\"reached_step\\": $((n * 10))" > {tmp_path}/starts.json'
    code, calls = _run("slurm.sbatch", tmp_path, f"[ $n -gt 3 ] && exit 1; {gains}; exit 1")
    assert (code, calls) == (1, ["srun"] * 5)  # three that gained steps, two that did not


@pytest.mark.parametrize(
    ("reason", "code", "expected"),
    [
        ("exit_after", 0, (0, ["srun", "scontrol"])),
        ("sigterm", 1, (0, ["srun", "scontrol"])),  # torchrun's code after a signal
        ("stop_file", 0, (0, ["srun"])),
        (None, 1, (1, ["srun"])),
    ],
)
def test_torchruns_job_is_queued_again_by_what_stopped_json_says(
    reason: str | None, code: int, expected: tuple[int, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "stopped.json").write_text('{"reason": "sigterm"}')  # of an earlier start
    says = _says(tmp_path, reason) if reason else "true"
    assert _run("slurm_torchrun.sbatch", tmp_path, f"{says}; exit {code}") == expected
    assert "--max-restarts=10" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_a_job_that_cannot_be_queued_again_does_not_end_as_finished(
    script: str, tmp_path: Path
) -> None:
    srun = f"{_says(tmp_path, 'sigterm')}; exit 75"
    assert _run(script, tmp_path, srun, requeue_code=1) == (75, ["srun", "scontrol"])


def test_a_recipe_names_the_nodes_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho sbatch $@\n")
    (tmp_path / "sbatch").chmod(0o755)
    paths = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    recipe = ["--config", str(ROOT / "configs" / "llama3_8b.yaml")]
    command = ["bash", str(CLUSTER / "slurm.sbatch"), *recipe]
    ran = subprocess.run(
        [*command, "--trainer.num_nodes=2"],
        env=environment | {"PATH": paths, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    nodes = "sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8"
    assert ran.stdout.split() == [*nodes.split(), *command[1:], "--trainer.num_nodes=2"]
