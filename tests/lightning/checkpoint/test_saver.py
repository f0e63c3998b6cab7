"""When checkpoints are written, seen by a single rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from megatron_lightning.checkpoint import TensorShards, is_committed
from megatron_lightning.checkpoint.writing.background import HostBuffer
from megatron_lightning.checkpoint.writing.saver import Save, Saver
from megatron_lightning.checkpoint.writing.saving import take_snapshot, write_snapshot
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ALONE

CONTEXT: Any = SimpleNamespace(rank=0, axis=lambda name: ALONE)


def _plan(path: Path) -> Save:
    weight = TensorShards.full("weight", torch.ones(3))
    return Save(
        str(path), lambda group: take_snapshot(path, [weight], {}, group=group), write_snapshot
    )


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_a_host_without_memory_for_the_copy_is_a_failed_save(
    action: Literal["warn", "raise"], tmp_path: Path
) -> None:
    saver = Saver(CheckpointOptions(async_save=True, on_save_error=action), timedelta(minutes=1))
    expected: Any = (
        pytest.raises(CheckpointError, match="no memory")
        if action == "raise"
        else pytest.warns(match="no memory")
    )
    with mock.patch.object(HostBuffer, "copy_of", side_effect=MemoryError("no memory")), expected:
        saver.save(_plan(tmp_path / "a"), CONTEXT, background=True)
    saver.save(_plan(tmp_path / "b"), CONTEXT, background=True)
    saver.finish()
    assert not is_committed(tmp_path / "a") and is_committed(tmp_path / "b")
