"""Average the weights of several checkpoints (Izmailov et al., https://arxiv.org/abs/1803.05407),
box by box.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.entries import TABLE
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.naming import FULL_STATE, OWN
from megatron_lightning.checkpoint.format.streaming import (
    CHUNK_BYTES,
    read_box,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box

_WEIGHTS = "state_dict."
_SUMMED_IN_OWN_DTYPE = (torch.float64, torch.complex64)  # all other dtypes in float32


def average(
    target: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    *,
    advance: Advance = silent,
) -> None:
    """Write a checkpoint with the mean of the sources' weights.

    Sums are taken in float32 (float64 and complex64 without conversion) and rounded once. Integer
    and boolean buffers, hyper-parameters and counters are the last source's. The result holds no
    optimizer states. For the arguments see ``commands.average``.
    """
    if not sources:
        raise ConfigError(
            "there are no checkpoints to average. Name at least one after the target."
        )
    opened = [open_checkpoint(source) for source in sources]
    states = [source.state() for source in opened]
    own_state: dict[str, Any] = next((state[OWN] for state in reversed(states) if OWN in state), {})
    own_state = {
        key: value for key, value in own_state.items() if key != TABLE
    }  # only weights are written
    # Plain files have tied weights under each of their names, directories under their owner's.
    tensors = [_weights(source, leave_out=own_state.get("tied", {})) for source in opened]
    if not tensors[-1]:
        raise CheckpointError(f"{sources[-1]} holds no weights. Name checkpoints of a model.")
    for path, source_tensors in zip(sources, tensors, strict=True):
        _check_same(str(sources[-1]), tensors[-1], str(path), source_tensors)

    def fetch(name: str, box: Box) -> Tensor:
        entry = tensors[-1][name]
        if not (entry.dtype.is_floating_point or entry.dtype.is_complex):
            return read_box(opened[-1], name, entry.dtype, box)
        # One box of all sources at a time, so that memory does not grow with the model.
        total = torch.zeros(
            box.shape, dtype=entry.dtype if entry.dtype in _SUMMED_IN_OWN_DTYPE else torch.float32
        )
        for source in opened:
            total += read_box(source, name, entry.dtype, box).to(total.dtype)
            advance(entry.num_bytes(box.shape))
        return (total / len(opened)).to(entry.dtype)

    write_checkpoint(
        target,
        tensors[-1],
        fetch,
        {key: value for key, value in states[-1].items() if key not in FULL_STATE}
        | ({OWN: own_state} if own_state else {}),
        {
            "average_of": [str(source) for source in sources],
            "tied": dict(own_state.get("tied", {})),
        },
        files=spread_evenly(tensors[-1], lambda info: slabs(info, CHUNK_BYTES), 1),
    )


def _weights(source: CheckpointSource, leave_out: Collection[str]) -> dict[str, TensorInfo]:
    weights = {name: entry for name, entry in source.tensors().items() if name.startswith(_WEIGHTS)}
    return {
        name: entry
        for name, entry in weights.items()
        if name.removeprefix(_WEIGHTS) not in leave_out
    }


def _check_same(
    reference: str, expected: dict[str, TensorInfo], path: str, found: dict[str, TensorInfo]
) -> None:
    differing = sorted(
        name for name in {*expected, *found} if expected.get(name) != found.get(name)
    )
    if differing:
        name = differing[0]
        one, second = (
            f"{e.shape} {e.dtype}" if e else "no such tensor"
            for e in (expected.get(name), found.get(name))
        )
        raise CheckpointError(
            f"{path} and {reference} are not of one model: {len(differing)} tensors differ, the "
            f"first is {name}: {second} and {one}. Average checkpoints of one training run."
        )
