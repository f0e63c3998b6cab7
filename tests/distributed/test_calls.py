"""Collectives of objects, called by different functions on different ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_lightning.errors import RankError
from megatron_lightning.parallel.grid.context import AxisGroup
from tests.helpers.ranks import run_ranks


def _lone(world: AxisGroup) -> None:
    world.all_gather_object("the state of a model")


def _together(world: AxisGroup) -> list[int]:
    return world.all_gather_object(dist.get_rank())


def _mixed() -> str:
    world = AxisGroup("world", (0, 1), dist.get_rank(), dist.group.WORLD)
    assert _together(world) == [0, 1]
    with pytest.raises(RankError) as caught:
        if dist.get_rank() == 0:
            _lone(world)
        else:
            _together(world)
    return str(caught.value)


def test_functions_that_differ_are_named_on_every_rank() -> None:
    first, second = run_ranks(2, _mixed)
    assert first == second
    assert "rank 0 has called" in first and "rank 1 has called" in first
    assert "test_calls.py" in first and "if trainer.is_global_zero" in first
