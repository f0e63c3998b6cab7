"""kill -9 at random points in and around a save of two ranks: the last committed state is there, whole, and saving goes on."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from megatron_lightning.parallel.context import AxisGroup
from tests.faults.saving import Fuse, Save, alone, die, run_two, save, save_in_background, sound_version_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)
FIRST_SEED, NUM_POINTS = 20, 30  # of each of four kinds of saves
LONG_SEED, NUM_LONG_POINTS = 21, 500

Outcome = tuple[int | None, list[int]]
"""(version found afterwards, how the ranks ended)."""


def _events(folder: str, method: Save, overwrite: bool) -> list[int]:
    """Return how many events a save has on each rank."""

    def job(rank: int, group: AxisGroup) -> None:
        fuse = Fuse(None, die)
        fuse.light()
        method(f"{folder}/a.ckpt", 2, group)
        Path(folder, f"events-{rank}").write_text(json.dumps(fuse.count))

    if overwrite:
        save(f"{folder}/a.ckpt", 1, alone())
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
    save(f"{folder}/warm.ckpt", 1, alone())  # what is imported lazily is imported before events are counted
    events = _events(folder, method, overwrite)
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    for number in range(2 * num_points):  # a late point may lie beyond the end: threads make the number of events vary
        if _num_killed(outcomes) == num_points:
            break
        victims = chance.choice([(0,), (1,), (0, 1)])
        first = (0.0, 0.8, 0.95)[number % 3]  # the commit and what follows it are the last few of thousands of events
        points = {rank: chance.randint(1 + int(first * events[rank]), events[rank]) for rank in victims}
        case = Path(folder, str(number))
        case.mkdir()
        outcomes.append(_kill_once(str(case), method, overwrite, points))
    return outcomes


def _num_killed(outcomes: list[Outcome]) -> int:
    return sum(-signal.SIGKILL in ends for _, ends in outcomes)


def _check(outcomes: list[Outcome], before: int | None, num_points: int) -> None:
    assert _num_killed(outcomes) == num_points
    assert {found for found, _ in outcomes} == {before, 2}, "the points should fall on both sides of the commit"
    for found, ends in outcomes:
        if ends[0] == 0:  # the first rank returned from the save: it was promised to be there
            assert found == 2


@pytest.mark.parametrize("method", [save, save_in_background])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_random_points(tmp_path: Path, method: Save, overwrite: bool) -> None:
    (outcomes,) = run_ranks(1, _kill_at_random, str(tmp_path), method, overwrite, NUM_POINTS, FIRST_SEED, timeout_s=300)
    _check(outcomes, 1 if overwrite else None, NUM_POINTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", [save, save_in_background])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_many_random_points(tmp_path: Path, method: Save, overwrite: bool) -> None:
    (outcomes,) = run_ranks(1, _kill_at_random, str(tmp_path), method, overwrite, NUM_LONG_POINTS, LONG_SEED, timeout_s=3000)
    _check(outcomes, 1 if overwrite else None, NUM_LONG_POINTS)
