"""A run that starts again in its processes has the losses and samples of one that never failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.restart import Restarts
from megatron_lightning.strategies import run_with_restarts
from tests.faults.processes import Ended, run_to_the_end
from tests.faults.restarting import STEPS

pytestmark = pytest.mark.timeout(240)
Values = dict[tuple[int, int], set[str]]


def _run(launcher: str, folder: Path, faults: str, devices: int, workers: str = "0") -> Ended:
    first = ["-m"]
    if launcher == "torchrun":
        first = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
        first += [f"--nproc-per-node={devices}", "-m"]
    job = ["tests.faults.restarting", str(folder), faults, str(devices), workers]
    return run_to_the_end([*first, *job])


def _values(output: str, name: str) -> Values:
    """Return the values that were printed, by rank and step."""
    found: Values = {}
    for rank, step, value in re.findall(rf"{name} (\d) (\d+) (\S+)", output):
        found.setdefault((int(rank), int(step)), set()).add(value)
    return found


def _assert_whole(ended: Ended, devices: int, first_losses: int = 1) -> None:
    """All steps were trained; those that were trained again gave the same bits."""
    assert ended.code == 0 and ended.output.count("DONE") == devices, ended.output
    for name, first in (("LOSS", first_losses), ("SAMPLES", 0)):
        values = _values(ended.output, name)
        steps = range(first, first + STEPS)
        assert values.keys() == {(r, s) for r in range(devices) for s in steps}, ended.output
        assert {len(v) for v in values.values()} == {1}, values


@pytest.mark.slow
def test_a_run_starts_again_after_an_exception_of_any_rank(tmp_path: Path) -> None:
    ended = _run("popen", tmp_path, "0:1:5,1:0:7", 2)
    _assert_whole(ended, 2)
    assert "restart 2 of 3 in these processes after RuntimeError" in ended.output
    seconds = [float(s) for s in re.findall(r"BACK (\S+)", ended.output)]
    assert len(seconds) == 4 and max(seconds) < 15, seconds  # 1 to 2 on an idle machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "workers"),
    [("popen", "2"), ("popen", "thread"), ("torchrun", "0"), ("torchrun", "2")],
)
def test_losses_and_samples_are_those_of_an_undisturbed_run(
    launcher: str, workers: str, tmp_path: Path
) -> None:
    whole = _run(launcher, tmp_path / "whole", "", 4, workers)
    failed = _run(launcher, tmp_path / "failed", "0:3:5,1:0:7,2:1:9", 4, workers)
    _assert_whole(whole, 4)
    _assert_whole(failed, 4)
    for name in ("LOSS", "SAMPLES"):
        assert _values(whole.output, name) == _values(failed.output, name)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_its_launchers_to_start_again(rank: int, tmp_path: Path) -> None:
    ended = _run("torchrun", tmp_path, f"0:1:3,k:{rank}:7", 2)
    _assert_whole(ended, 2)
    assert "restart 1 of 3" in ended.output, ended.output


def test_errors_of_settings_and_stops_are_not_repeated() -> None:
    calls: list[int] = []

    def make_run() -> None:
        calls.append(1)
        raise ConfigError("wrong")

    with pytest.raises(ConfigError):
        run_with_restarts(make_run, Restarts(in_process=3))
    assert len(calls) == 1
    with pytest.raises(ConfigError, match=r"restarts\.in_process is -1\. Set it to 0"):
        Restarts(in_process=-1)


def test_a_run_without_ranks_starts_again() -> None:
    calls: list[int] = []

    def make_run() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("a machine")
        return 7

    assert run_with_restarts(make_run, Restarts(in_process=2)) == 7
    calls.clear()
    with pytest.raises(RuntimeError, match="a machine"):
        run_with_restarts(make_run, Restarts(in_process=1))
