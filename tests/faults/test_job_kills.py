"""kill -9 in a whole training job: at any change of the disk while checkpoints are written,
replaced and deleted.

The job keeps two checkpoints and ``last``, so that a step writes two and deletes one. Afterwards
nothing hangs, every checkpoint there is complete, and ``ckpt_path="last"`` resumes bit-equal: the
losses and the last checkpoint are those of a job that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.checkpoint import is_committed, open_checkpoint
from megatron_lightning.checkpoint.reading.source import DirectorySource
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.parallel.grid.context import AxisGroup
from tests.faults.processes import run_to_the_end
from tests.faults.saving import run_two
from tests.faults.training import STEPS, Points, train
from tests.helpers.ranks import run_ranks

Job = Callable[[Path, str, Points], list[int]]
"""(folder, sync or async, points) -> how the ranks, or the job's main process, ended."""


def _forked(folder: Path, saving: str, points: Points) -> list[int]:
    """Run the job in two forked ranks."""

    def job(rank: int, group: AxisGroup) -> None:
        Path(folder, f"ended-{rank}").write_text(json.dumps(train(str(folder), saving, points)))

    return run_two(job)


def _started(launcher: str, folder: Path, saving: str, points: Points) -> list[int]:
    """Run the job as a program, with our own launcher or torchrun; return its exit code."""
    program = ["-m", "tests.faults.training", "popen", str(folder), saving, json.dumps(points)]
    if launcher == "torchrun":
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    ended = run_to_the_end(program)
    assert points or ended.code == 0, ended.output
    assert ended.elapsed_s < 60, ended.output
    return [ended.code]


def _ended(folder: Path, rank: int = 0) -> tuple[dict[int, float], list[str]]:
    """Return a rank's losses by step, and its changes of the disk."""
    losses, changes = json.loads((folder / f"ended-{rank}").read_text())
    return {int(step): loss for step, loss in losses.items()}, changes


def _content(path: Path) -> dict[str, Any]:
    """Return the checksums of all tensors of a checkpoint."""
    source = open_checkpoint(path)
    assert isinstance(source, DirectorySource)
    return {n: [(s.box, s.checksums) for s in t.shards] for n, t in source.manifest.tensors.items()}


def _sound_steps(run: Path) -> dict[str, int]:
    """Return checkpoint -> step of all that is visible in a folder, all of which must be whole."""
    found = {}
    for path in run.glob("*.ckpt") if run.is_dir() else ():
        assert is_committed(path) and verify(path) == [], path
        found[path.name] = open_checkpoint(path).state()["global_step"]
        number = re.match(r"step=(\d+)", path.name)
        assert number is None or int(number[1]) == found[path.name], path
    return found


def _kill_and_resume(
    folder: Path, job: Job, saving: str, points: Points, reference: Path
) -> tuple[int, bool]:
    """Kill a job and start it again; return the step that it went on from, and whether it was
    killed at all."""
    folder.mkdir()
    ends = job(folder, saving, points)
    begun = (folder / "begun").stat().st_size
    there = _sound_steps(folder / "run")
    again = job(folder, saving, {})
    assert again in ([0], [0, 0]), again
    losses, _ = _ended(folder)
    expected, _ = _ended(reference)
    first = min(losses) - 1 if losses else STEPS
    assert losses == {step: loss for step, loss in expected.items() if step > first}
    assert first == there.get("last.ckpt", 0)  # Lightning's "last", whole
    # A synchronous save is there when the next step begins, one in the background a step later.
    assert first >= begun - (1 if saving == "sync" else 2), (first, begun)
    assert _content(folder / "run" / "last.ckpt") == _content(reference / "run" / "last.ckpt")
    left = _sound_steps(folder / "run")
    assert sorted(os.listdir(folder / "run")) == sorted(left), "the job that resumes cleans up"
    assert {"last.ckpt": STEPS} | {f"step={STEPS}.ckpt": STEPS} == {
        name: left[name] for name in ("last.ckpt", f"step={STEPS}.ckpt")
    }
    return first, ends not in ([0], [0, 0])


def _random_points(changes: list[list[str]], seed: int) -> Iterator[Points]:
    chance = random.Random(seed)
    while True:
        victims = chance.choice([(0,), (1,), (0, 1)])
        yield {rank: chance.randint(1, len(changes[rank])) for rank in victims}


def _named_points(changes: list[list[str]]) -> Iterator[Points]:
    """Yield points of which one wants to be sure: between the new checkpoint and the deletion of
    the old one, and so on."""
    deletions = [
        i
        for i, change in enumerate(changes[0])
        if re.match(r"rename step=\d\.ckpt step=\d\.ckpt\.tmp-", change)
    ]
    files = [
        i for i, change in enumerate(changes[0]) if change.startswith("unlink") and i > deletions[0]
    ]
    new_last = [
        i
        for i, change in enumerate(changes[0])
        if change.startswith("replace manifest") and i > deletions[0]
    ]
    yield {0: files[1] + 1}  # in the middle of a deletion
    yield {0: deletions[0] + 1}  # the new checkpoint is there, the old one not deleted
    yield {0: deletions[0] + 2}  # it has just disappeared from view
    yield {0: new_last[0] + 1, 1: len(changes[1])}  # `last` has both the old and the new files
    yield {0: new_last[0] + 2}  # and now the new manifest


def _kill_forked(folder: str, saving: str, kind: str, num_points: int) -> list[int]:
    """Kill jobs of forked ranks at so many points; return the steps that they went on from."""
    reference = Path(folder, "whole")
    reference.mkdir()
    assert _forked(reference, saving, {}) == [0, 0]
    changes = [_ended(reference, rank)[1] for rank in range(2)]
    chosen = _named_points(changes) if kind == "named" else _random_points(changes, 30)
    outcomes = [
        _kill_and_resume(Path(folder, str(number)), _forked, saving, points, reference)
        for number, points in zip(range(num_points), chosen, strict=False)
    ]
    # One that aims at the very end may miss.
    assert sum(killed for _, killed in outcomes) >= 0.9 * num_points
    return [first for first, _ in outcomes]


@pytest.mark.slow  # test_save_kills kills while a checkpoint is deleted
def test_a_job_killed_while_it_deletes_resumes(tmp_path: Path) -> None:
    ((first,),) = run_ranks(1, _kill_forked, str(tmp_path), "async", "named", 1, timeout_s=110)
    assert 0 < first < STEPS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("saving", "kind", "num_points"),
    [("async", "named", 5), ("sync", "named", 5), ("async", "random", 60), ("sync", "random", 40)],
)
def test_killed_jobs_resume(saving: str, kind: str, num_points: int, tmp_path: Path) -> None:
    (steps,) = run_ranks(1, _kill_forked, str(tmp_path), saving, kind, num_points, timeout_s=3500)
    assert len(steps) == num_points
    if kind == "random":
        assert set(steps) >= set(range(STEPS)), steps  # from the beginning, and after every step


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_killed_programs_resume(launcher: str, part: int, tmp_path: Path) -> None:
    """As users start them: our launcher and torchrun notice the dead process and end the others."""

    def job(folder: Path, saving: str, points: Points) -> list[int]:
        return _started(launcher, folder, saving, points)

    reference = tmp_path / "whole"
    reference.mkdir()
    assert job(reference, "async", {}) == [0]
    changes = [_ended(reference, rank)[1] for rank in range(2)]
    points = [*_named_points(changes), *islice(_random_points(changes, 31), 5)][part::5]
    outcomes = [
        _kill_and_resume(tmp_path / str(i), job, "async", point, reference)
        for i, point in enumerate(points)
    ]
    # The named point is hit; one that aims at the very end may miss.
    assert outcomes[0][1] and len(outcomes) == 2
