"""Jobs by submitit, Ray Train and NeMo-Run on this machine, where these are installed, and files
for SkyPilot and Docker as far as they can be checked without them."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
STEPS = 12


def _recipe(folder: Path) -> Path:
    """Write a recipe of two ranks with data out of nothing."""
    recipe = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    trainer, data = recipe["trainer"], recipe["data"]["init_args"]
    trainer["strategy"]["init_args"]["pipeline_model_parallel_size"] = 1
    trainer |= {"max_steps": STEPS, "limit_val_batches": 0, "log_every_n_steps": 1}
    trainer["default_root_dir"] = str(folder / "run")
    trainer["enable_progress_bar"] = False
    logger: dict[str, Any] = {"save_dir": str(folder / "run"), "name": "logs"}
    trainer["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {**logger, "version": 0, "flush_logs_every_n_steps": 1},
    }
    saved = {"dirpath": str(folder / "run" / "saved"), "every_n_train_steps": 5, "save_last": True}
    trainer["callbacks"] = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saved}
    ]
    del data["data_prefix"], data["tokenizer_model"], data["split"]
    data |= {"mock": True, "vocab_size": 2048, "batch_size": 4, "num_train_samples": 4 * STEPS}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _losses(folder: Path) -> dict[int, float]:
    """Return the last loss of every logged step."""
    (path,) = (folder / "run" / "logs").rglob("metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    return {int(row["step"]): float(row["train_loss"]) for row in rows}


def _undisturbed(folder: Path) -> dict[int, float]:
    folder.mkdir()
    command = [sys.executable, "-m", "megatron_lightning", "fit", f"--config={_recipe(folder)}"]
    subprocess.run([*command, "--trainer.devices=2"], check=True, cwd=folder, env=_environment())
    return _losses(folder)


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submitit_runs_two_tasks(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    folder = tmp_path / "job"
    folder.mkdir()
    command = [
        sys.executable, str(CLUSTER / "submitit_job.py"), "--cluster=local", "--tasks=2",
        "--accelerator=cpu", f"--folder={tmp_path}/submitit", f"--config={_recipe(folder)}",
    ]  # fmt: skip
    result = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    losses = _losses(folder)
    assert list(losses) == list(range(STEPS)) and losses == _undisturbed(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_train_resumes_after_a_killed_worker(tmp_path: Path) -> None:
    if find_spec("ray") is None:  # an import would leave variables behind
        pytest.skip("ray is not installed")
    folder = tmp_path / "job"
    folder.mkdir()
    recipe = _recipe(folder)
    (folder / "killed_once.py").write_text(
        f"""
import os, signal
from pathlib import Path
from lightning.pytorch.callbacks import Callback
class KilledOnce(Callback):
    def on_train_batch_start(self, trainer, *_):
        mark = Path({str(folder)!r}, "killed")
        if trainer.global_rank == 1 and trainer.global_step == 8 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.{signal.SIGKILL.name})
"""
    )
    environment = _environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
    command = [
        sys.executable, str(CLUSTER / "ray_train.py"), "--workers=2", "--accelerator=cpu",
        f"--storage={tmp_path}/ray", f"--config={recipe}",
        "--trainer.callbacks+=killed_once.KilledOnce",
    ]  # fmt: skip
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert (folder / "killed").exists()
    losses = _losses(folder)
    assert list(losses) == list(range(STEPS)) and losses == _undisturbed(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nemo_run_runs_a_fit_on_this_machine(tmp_path: Path) -> None:
    if find_spec("nemo_run") is None:  # an import would leave variables behind
        pytest.skip("nemo_run is not installed")
    folder = tmp_path / "job"
    folder.mkdir()
    command = f"{sys.executable} -m megatron_lightning fit --config={_recipe(folder)}"
    program = folder / "job.py"
    # As docs/long_runs.md has it, with the executor of this machine.
    program.write_text(
        f"""
import nemo_run as run
if __name__ == "__main__":
    script = run.Script(inline="{command} --trainer.devices=2")
    run.run(script, executor=run.LocalExecutor(), name="fit")
"""
    )
    result = subprocess.run(
        [sys.executable, str(program)], cwd=folder, capture_output=True, text=True, check=False,
        env={**_environment(), "NEMORUN_HOME": str(tmp_path / "nemo")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    losses = _losses(folder)
    assert list(losses) == list(range(STEPS)) and losses == _undisturbed(tmp_path / "plain")


def test_skypilots_commands_parse() -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"] == "H100:8"
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    line = task["run"].replace("\\\n", " ").replace('"', "")
    line = re.sub(r"\$\(.*?\)", "host", re.sub(r"\$SKYPILOT_NODE_IPS", "ip", line))
    words = shlex.split(re.sub(r"\$SKYPILOT_\w+", "1", line))
    assert words[0] == "torchrun"
    parsed = get_args_parser().parse_args(words[1:])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("1", "1", 3)
    assert parsed.module and parsed.training_script == "megatron_lightning"
    assert parsed.training_script_args[:3] == ["fit", "--config", "configs/llama3_8b.yaml"]
