"""Copies on a node's own disk, seen by a single rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_lightning.checkpoint import TensorShards
from megatron_lightning.checkpoint.agreement import ALONE
from megatron_lightning.checkpoint.local import LocalCopies


def test_a_run_that_goes_back_replaces_the_copies_of_later_steps(tmp_path: Path) -> None:
    copies = LocalCopies(str(tmp_path), ALONE, 1)

    def save(step: int) -> list[int]:
        weight = TensorShards.whole("weight", torch.full((2,), float(step)))
        copies.write(copies.take_snapshot(step, [weight], {"global_step": step}))
        newest = copies.open(1, same_layout=True)
        assert newest is not None and newest.state()["global_step"] == step
        return sorted(int(name.split("-")[1]) for name in os.listdir(tmp_path))

    assert [save(step) for step in (1, 2, 3)] == [[1], [1, 2], [2, 3]]
    assert save(2) == [2]  # resumed from an older checkpoint: step 3 is of a run that was given up
    assert save(3) == [2, 3]
