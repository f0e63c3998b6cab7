"""kill -9 at random points in and around a save of two ranks: the last committed state is there, whole, and saving goes on."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from megatron_lightning.parallel.context import AxisGroup
from tests.faults.saving import Fuse, Save, alone, die, run_two, save, sound_version_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)
FIRST_SEED, NUM_POINTS = 20, 50  # of either kind of save
LONG_SEED, NUM_LONG_POINTS = 21, 500

Outcome = tuple[int | None, list[int]]
"""(version found afterwards, how the ranks ended)."""


def _events(folder: str, method: Save, overwrite: bool) -> list[int]:
    """Return how many events a save has on each rank."""

    def job(rank: int, group: AxisGroup) -> None:
        fuse = Fuse(None, die)
        if overwrite:
            method(f"{folder}/a.ckpt", 1, group)
        fuse.light()
        method(f"{folder}/a.ckpt", 2, group)
        Path(folder, f"events-{rank}").write_text(json.dumps(fuse.count))

    assert run_two(job) == [0, 0]
    return [int(Path(folder, f"events-{rank}").read_text()) for rank in range(2)]


def _kill_once(folder: str, method: Save, overwrite: bool, points: dict[int, int]) -> Outcome:
    """Kill the ranks of ``points`` at these events of saving version 2; return the version found and how the ranks ended."""
    path = f"{folder}/a.ckpt"
    if overwrite:
        save(path, 1, alone())

    def job(rank: int, group: AxisGroup) -> None:
        Fuse(points.get(rank), die).light()
        method(path, 2, group)

    ends = run_two(job)
    found = sound_version_of(path)
    save(path, 3, alone())  # nothing that the kill left is in the way
    assert sound_version_of(path) == 3
    assert os.listdir(folder) == ["a.ckpt"], "the next save cleans up"
    return found, ends


def _kill_at_random(
    folder: str, method: Save, overwrite: bool, num_points: int, seed: int
) -> list[tuple[int | None, list[int]]]:
    events = _events(folder, method, overwrite)
    chance = random.Random(seed)
    outcomes = []
    for number in range(num_points):
        victims = chance.choice([(0,), (1,), (0, 1)])
        points = {rank: chance.randint(1, events[rank]) for rank in victims}
        case = Path(folder, str(number))
        case.mkdir()
        outcomes.append(_kill_once(str(case), method, overwrite, points))
    return outcomes


def _check(outcomes: list[Outcome], before: int | None) -> None:
    assert {found for found, _ in outcomes} == {before, 2}, "the points should fall on both sides of the commit"
    killed = sum(-signal.SIGKILL in ends for _, ends in outcomes)
    assert killed > 0.8 * len(outcomes)  # threads and lazy imports make the number of events vary
    for found, ends in outcomes:
        if ends[0] == 0:  # the first rank returned from the save: it was promised to be there
            assert found == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_random_points(tmp_path: Path, overwrite: bool) -> None:
    (outcomes,) = run_ranks(1, _kill_at_random, str(tmp_path), save, overwrite, NUM_POINTS, FIRST_SEED, timeout_s=300)
    _check(outcomes, 1 if overwrite else None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_many_random_points(tmp_path: Path, overwrite: bool) -> None:
    (outcomes,) = run_ranks(1, _kill_at_random, str(tmp_path), save, overwrite, NUM_LONG_POINTS, LONG_SEED, timeout_s=3000)
    _check(outcomes, 1 if overwrite else None)
