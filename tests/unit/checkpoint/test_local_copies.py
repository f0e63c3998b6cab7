"""Copies on a node's own disk, seen by a single rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from megatron_lightning.checkpoint import TensorShards
from megatron_lightning.checkpoint.local_copies.local import LocalCopies, Pointer
from megatron_lightning.parallel.grid.context import ALONE


class _Run:
    """A run that keeps copies in a folder and its pointer in a file."""

    def __init__(self, folder: Path, pointer: Path) -> None:
        self.folder, self._pointer = folder, str(pointer)
        self._copies = LocalCopies(str(folder), ALONE, 1)

    def save(self, step: int) -> list[int]:
        """Write a copy; return the steps of the copies in the folder."""
        weight = TensorShards.full("weight", torch.full((2,), float(step)))
        snapshot = self._copies.take_snapshot(step, [weight], {"global_step": step})
        self._copies.write(snapshot)
        Pointer(str(self.folder), 1, 1, step, {}).write(
            self._pointer, Path(snapshot.path).parent.name
        )
        return sorted(int(name.split("-")[1]) for name in os.listdir(self.folder))

    def newest(self) -> int | None:
        """Return the step that the run would resume from."""
        pointer = Pointer.read(self._pointer)
        assert pointer is not None
        found = self._copies.open(pointer.copies, 1, same_layout=True)
        return None if found is None else int(found.state()["global_step"])


def test_a_run_that_goes_back_replaces_the_copies_of_later_steps(tmp_path: Path) -> None:
    run = _Run(tmp_path / "node", tmp_path / "local.ckpt")
    for step, left in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
        assert run.save(step) == left and run.newest() == step
    # Resumed from an older checkpoint: step 3 is of a run that was given up.
    assert run.save(2) == [2]
    assert run.save(3) == [2, 3]
    shutil.rmtree(next((tmp_path / "node").glob("step-*3-*")))
    assert run.newest() == 2


def test_a_run_resumes_from_its_own_copies_alone(tmp_path: Path) -> None:
    """Two runs were given one folder: the other one's copies are of later steps."""
    run, other = (_Run(tmp_path / "node", tmp_path / name) for name in ("local.ckpt", "other.ckpt"))
    run.save(1)
    assert other.save(5) == [1, 5]
    assert (run.newest(), other.newest()) == (1, 5)
    shutil.rmtree(next((tmp_path / "node").glob("step-*1-*")))
    assert run.newest() is None
