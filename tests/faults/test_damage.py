"""Truncated, missing, swapped and bit-flipped files: a load gives exactly what was saved, or a
clear error."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.errors import CheckpointError
from tests.faults.saving import alone, save, version_of

NUM_WOUNDS = 40  # of each kind


def _flip(file: Path, chance: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def _truncate(file: Path, chance: random.Random, other: Path) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _grow(file: Path, chance: random.Random, other: Path) -> None:
    with open(file, "ab") as stream:
        stream.write(chance.randbytes(chance.randint(1, 100)))


def _zero(file: Path, chance: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    first = chance.randrange(len(content))
    content[first:] = bytes(len(content) - first)  # blocks that a crashed machine never wrote
    file.write_bytes(content)


def _remove(file: Path, chance: random.Random, other: Path) -> None:
    file.unlink()


def _swap(file: Path, chance: random.Random, other: Path) -> None:
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


def _take_from_another_save(file: Path, chance: random.Random, other: Path) -> None:
    """Put the file of another version of the same checkpoint there, as a careless copy does."""
    kind = file.name.split(".")[0]
    foreign = sorted(
        p for p in (file.parents[1] / "other.ckpt").iterdir() if p.name.split(".")[0] == kind
    )
    shutil.copy(chance.choice(foreign), file)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "wound", [_flip, _truncate, _grow, _zero, _remove, _swap, _take_from_another_save]
)
def test_a_wounded_checkpoint_loads_exactly_or_not_at_all(
    tmp_path: Path, wound: Callable[[Path, random.Random, Path], None]
) -> None:
    save(str(tmp_path / "sound.ckpt"), 1, alone())
    save(str(tmp_path / "other.ckpt"), 2, alone())
    chance, outcomes = random.Random(wound.__name__), Counter[str]()
    for _ in range(NUM_WOUNDS):
        wounded = tmp_path / "wounded.ckpt"
        shutil.copytree(tmp_path / "sound.ckpt", wounded)
        files = sorted(wounded.iterdir())
        file, other = chance.sample(files, 2)
        before = {path.name: path.read_bytes() for path in files}
        wound(file, chance, other)
        changed = {
            path.name
            for path in files
            if not path.exists() or path.read_bytes() != before[path.name]
        }
        outcomes[_outcome(wounded, changed)] += 1
        shutil.rmtree(wounded)
    assert (
        set(outcomes) <= {"error", "nothing there", "exact"} and outcomes["error"] > NUM_WOUNDS // 2
    ), outcomes


def _outcome(path: Path, changed: set[str]) -> str:
    try:
        version = version_of(path)
    except CheckpointError as error:
        assert (
            "Restore" in str(error)
            or "Resume" in str(error)
            or "Use another" in str(error)
            or "install" in str(error)
        )
        _assert_verify_finds(path, changed)
        return "error"
    if version is None:
        assert changed == {"manifest.json"}
        return "nothing there"
    # What loading does not look at: the shapes in headers, which other programs read.
    assert version == 1 or changed == {"manifest.json"}, (
        "the manifest of the other version names its own files"
    )
    _assert_verify_finds(path, changed)
    return "exact"


def _assert_verify_finds(path: Path, changed: set[str]) -> None:
    """The tool names every changed file; a wrong manifest may name others, or nothing can be
    compared with it."""
    try:
        found = {damage.file for damage in verify(path)}
    except CheckpointError:
        assert "manifest.json" in changed
    else:
        assert found if "manifest.json" in changed else found == changed
