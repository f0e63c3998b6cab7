"""``megatron-lightning doctor``: versions, collectives of every axis, and the checkpoint folder."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections import namedtuple
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lightning.cli import main
from megatron_lightning.doctor import machine
from megatron_lightning.doctor.command import _link_text, _machine_text, doctor
from megatron_lightning.doctor.folder import checkpoint_bytes, look_at
from megatron_lightning.errors import ConfigError
from megatron_lightning.mistakes import Errors
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.planning.planned_run import Recipe
from megatron_lightning.recipe_reading.recipe_reader import read_recipe
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")


def test_one_process_reports_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--devices=1", f"--dirpath={tmp_path}/to/come"])
    text = capsys.readouterr().out
    assert f"torch {version('torch')}" in text and "one rank: nothing to test" in text
    assert "Transformer Engine: does not load: " in text or "Transformer Engine: 2" in text
    assert "gemm: slowest rank 0" in text and "memory: slowest rank 0" in text
    assert "CUDA_LAUNCH_BLOCKING is not set (expected: unset, or 0)" in text
    assert "gloo: available" in text and "GiB free, writes" in text
    assert not list(tmp_path.iterdir())


def _arguments(folder: Path) -> list[str]:
    return [
        "doctor", f"--config={TINY}", "--seconds=0.2", "--json", "--trainer.devices=2",
        "--trainer.strategy.init_args.tensor_model_parallel_size=1",
        "--trainer.strategy.init_args.pipeline_model_parallel_size=2", f"--dirpath={folder}",
    ]  # fmt: skip


def _report_of_rank(folder: Path, port: int) -> str:
    """Return what a process of torchrun prints; the doctor makes the process group."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with redirect_stdout(io.StringIO()) as printed:
        main(_arguments(folder))
    return printed.getvalue()


def test_ranks_test_every_axis(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = run_ranks(2, _report_of_rank, tmp_path, port)
    assert second == ""
    _check_report(first)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_of_torchrun_test_every_axis(tmp_path: Path) -> None:
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    command = [*starter, "megatron_lightning", *_arguments(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    _check_report(result.stdout)


def _check_report(text: str) -> None:
    found = json.loads(text)  # one report, of rank 0
    assert (found["launcher"], found["world_size"]) == ("torchrun", 2)
    (row,) = found["links"]
    assert (row["axis"], row["size"], row["ranks"], row["is_right"]) == ("pp", 2, [0, 1], True)
    assert row["all_reduce"] > 0 and row["slowest_pair"] > 0
    assert [(row["test"], row["peak"]) for row in found["machine"]] == [
        ("gemm", None), ("memory", None)
    ]  # fmt: skip
    for row in found["machine"]:
        assert 0 < row["slowest"] <= row["median"] and row["rank"] in {0, 1}
    assert "NCCL_ALGO" in found["variables"]


def _recipe() -> Recipe:
    recipe = read_recipe([TINY], [], None, Errors())
    assert recipe is not None
    return recipe


def test_checkpoints_are_compared_with_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = checkpoint_bytes(_recipe())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10 * each, 7 * each, 3 * each))
    assert look_at(tmp_path, each, 3)["fits"] and not look_at(tmp_path, each, 4)["fits"]
    options = "trainer.strategy.init_args."
    ones = [f"{options}{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")]
    text, is_well = doctor(
        config=TINY, overrides=ones, devices=1, dirpath=str(tmp_path), kept_copies=3
    )
    assert not is_well and "DO NOT FIT: keep fewer, or use another folder" in text


@pytest.mark.slow
@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_bytes_of_a_checkpoint_are_those_of_its_shards(tmp_path: Path, precision: Any) -> None:
    model = tiny_config(hidden_size=128, vocab_size=2048)
    recipe = replace(_recipe(), precision=precision, model=model)
    fit = trainer(MegatronStrategy(), max_steps=1, precision=precision)
    data = PretrainDataModule(
        mock=True, vocab_size=2048, sequence_length=16, batch_size=1, num_train_samples=1
    )
    fit.fit(GPTLightningModule(config=recipe.model), data)
    fit.save_checkpoint(tmp_path / "saved.ckpt")
    shards = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert shards == pytest.approx(checkpoint_bytes(recipe), rel=0.02)


def test_the_slowest_pair_is_named() -> None:
    row: dict[str, Any] = {
        "axis": "dp", "size": 4, "all_reduce": 1.0, "is_right": True, "slowest_pair": 0.2,
        "median_pair": 1.5, "is_slow": True, "ranks": [2, 3], "hosts": ["n1", "n2"],
    }  # fmt: skip
    text = _link_text(row)
    assert "slowest pair ranks 2 and 3 (n1 to n2) 0.20 GB/s, SLOW: the median pair" in text
    assert "WRONG SUMS" in _link_text({**row, "is_right": False})


def test_the_slowest_device_is_named() -> None:
    row: dict[str, Any] = {
        "test": "gemm", "slowest": 480.0, "median": 700.0, "is_slow": True, "peak": 989.0,
        "rank": 5, "host": "n1",
    }  # fmt: skip
    expected = (
        "  gemm: slowest rank 5 (on n1) 480 TFLOP/s, median 700, 49% of the peak of 989, SLOW"
    )
    assert _machine_text(row) == expected
    assert "SLOW" not in _machine_text({**row, "is_slow": False})


def test_a_slow_device_has_a_flag_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"gemm": [700.0, 480.0, 710.0], "memory": [3.0, 2.9, 3.1]}
    ranks = [
        {"host": f"n{rank}", "speeds": {test: of_ranks[rank] for test, of_ranks in speeds.items()}}
        for rank in range(3)
    ]

    def gather(found: list[Any], own: object) -> None:
        found[:] = ranks

    monkeypatch.setattr(machine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(machine.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(machine.dist, "all_gather_object", gather)
    rows = machine.measure_machine(torch.device("cpu"), 0.01)
    assert [(row["test"], row["rank"], row["is_slow"]) for row in rows] == [
        ("gemm", 1, True),
        ("memory", 1, False),
    ]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="seconds is 0"):
        doctor(seconds=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        doctor(config="missing.yaml", devices=1)
