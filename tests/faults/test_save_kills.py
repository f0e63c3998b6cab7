"""kill -9 at random points in and around a save of two ranks: the last commit is there, complete,
and saving continues."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Literal

import pytest

from megatron_lightning.checkpoint import is_committed, remove_checkpoint
from megatron_lightning.parallel.grid.context import AxisGroup
from tests.faults.saving import (
    Fuse,
    Save,
    alone,
    die,
    run_two,
    save,
    save_in_background,
    sound_version_of,
    wait_all,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)
FIRST_SEED, NUM_POINTS = 20, 25  # of each of four kinds of saves
LONG_SEEDS, NUM_LONG_POINTS = range(21, 26), 100
Place = Literal["disk", "store"]

Outcome = tuple[int | None, list[int]]
"""(version found afterwards, how the ranks ended)."""


def _path(place: Place, folder: str) -> str:
    return f"bucket://{folder}/a.ckpt" if place == "store" else f"{folder}/a.ckpt"


def _events(folder: str, place: Place, method: Save, overwrite: bool) -> list[int]:
    """Return how many events a save has on each rank."""

    def job(rank: int, group: AxisGroup) -> None:
        fuse = Fuse(None, die)
        fuse.light()
        method(_path(place, folder), 2, group)
        Path(folder, f"events-{rank}").write_text(json.dumps(fuse.count))

    if overwrite:
        save(_path(place, folder), 1, alone())
    assert run_two(job) == [0, 0]
    return [int(Path(folder, f"events-{rank}").read_text()) for rank in range(2)]


def _kill_once(
    path: str, folder: Path, method: Save, overwrite: bool, points: dict[int, int]
) -> Outcome:
    """Kill the ranks of ``points`` at these events of saving version 2; return the version found
    and how the ranks ended."""
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
    remove_checkpoint(path)
    # What the kill left in a store.
    assert not folder.joinpath("a.ckpt").exists() or os.listdir(folder / "a.ckpt") == []
    return found, ends


def _kill_at_random(
    folder: str, place: Place, method: Save, overwrite: bool, num_points: int, seed: int
) -> list[Outcome]:
    # What is imported lazily is imported before events are counted.
    save(f"{folder}/warm.ckpt", 1, alone())
    events = _events(folder, place, method, overwrite)
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    # A late point may lie beyond the end: threads make the number of events vary.
    for number in range(2 * num_points):
        if _num_killed(outcomes) == num_points:
            break
        victims = chance.choice([(0,), (1,), (0, 1)])
        # The commit and what follows it are the last few of thousands of events.
        first = (0.0, 0.8, 0.95)[number % 3]
        points = {
            rank: chance.randint(1 + int(first * events[rank]), events[rank]) for rank in victims
        }
        case = Path(folder, str(number))
        case.mkdir()
        outcomes.append(_kill_once(_path(place, str(case)), case, method, overwrite, points))
    return outcomes


def _num_killed(outcomes: list[Outcome]) -> int:
    return sum(-signal.SIGKILL in ends for _, ends in outcomes)


def _check(
    outcomes: list[Outcome], before: int | None, num_points: int, *, both_sides: bool = True
) -> None:
    assert _num_killed(outcomes) == num_points
    assert {found for found, _ in outcomes} <= {before, 2}
    for found, ends in outcomes:
        if ends[0] == 0:  # the first rank returned from the save: it was promised to be there
            assert found == 2
    assert not both_sides or len({found for found, _ in outcomes}) == 2, (
        "the points should fall on both sides of the commit"
    )


KINDS = [
    ("disk", save),
    ("disk", save_in_background),
    ("store", save),
    ("store", save_in_background),
]


@pytest.mark.slow  # test_checkpoint kills before every change of the file system
@pytest.mark.parametrize(
    ("place", "method", "overwrite"),
    [
        (*KINDS[0], True),
        pytest.param(*KINDS[1], False, marks=pytest.mark.slow),
        pytest.param(*KINDS[0], False, marks=pytest.mark.slow),
        pytest.param(*KINDS[1], True, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_points(
    tmp_path: Path, place: Place, method: Save, overwrite: bool
) -> None:
    (outcomes,) = run_ranks(
        1,
        _kill_at_random,
        str(tmp_path),
        place,
        method,
        overwrite,
        NUM_POINTS,
        FIRST_SEED,
        timeout_s=300,
    )
    _check(outcomes, 1 if overwrite else None, NUM_POINTS)


def test_killed_at_some_points_of_a_save_to_an_object_store(tmp_path: Path) -> None:
    (outcomes,) = run_ranks(
        1,
        _kill_at_random,
        str(tmp_path),
        "store",
        save_in_background,
        True,
        10,
        FIRST_SEED,
        timeout_s=100,
    )
    _check(outcomes, 1, 10, both_sides=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "method"), KINDS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_killed_at_many_random_points(
    tmp_path: Path, place: Place, method: Save, overwrite: bool, seed: int
) -> None:
    (outcomes,) = run_ranks(
        1,
        _kill_at_random,
        str(tmp_path),
        place,
        method,
        overwrite,
        NUM_LONG_POINTS,
        seed,
        timeout_s=850,
    )
    _check(outcomes, 1 if overwrite else None, NUM_LONG_POINTS)


def _kill_deletions(folder: str, place: Place, num_points: int) -> list[int | None]:
    """Kill a process that deletes version 1 at so many points; return what was found afterwards."""
    path = _path(place, folder)
    save(path, 1, alone())

    def delete(fire_at: int | None) -> int:
        child = os.fork()
        if child == 0:
            fuse = Fuse(fire_at, die)
            fuse.light()
            remove_checkpoint(path)
            sys.setprofile(None)
            Path(f"{folder}-events").write_text(str(fuse.count))
            os._exit(0)
        return wait_all([child])[0]

    assert delete(None) == 0 and not is_committed(path)
    events, chance, found = int(Path(f"{folder}-events").read_text()), random.Random(FIRST_SEED), []
    for _ in range(num_points):
        save(path, 1, alone())
        assert delete(chance.randint(1, events)) in (-signal.SIGKILL, 0)
        found.append(sound_version_of(path))
        save(path, 2, alone())  # nothing that is left is in the way
        assert sound_version_of(path) == 2 and os.listdir(folder) == ["a.ckpt"]
    return found


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize("num_points", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_while_deleting(tmp_path: Path, place: Place, num_points: int) -> None:
    (tmp_path / "a").mkdir()
    (found,) = run_ranks(1, _kill_deletions, str(tmp_path / "a"), place, num_points, timeout_s=250)
    assert set(found) == {1, None}, "the points should fall on both sides of the deletion"
