"""Checkpoints larger than memory: tensors read in parts, and new checkpoints whose content is made while it is written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.commit import new_identifier, pending_save
from megatron_lightning.checkpoint.manifest import Shape, Shard, TensorEntry
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.shard_file import Piece, write_shards
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo
from megatron_lightning.checkpoint.state import dump_state
from megatron_lightning.checkpoint.storage import sync_directory

PART_BYTES = 64 << 20
"""What is held in memory at a time."""

Box = tuple[Shape, Shape]
"""(first index, extent) of an axis-aligned box of a tensor."""


def slabs(shape: Shape, max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes whose row-major bytes, one box after another, are those of the whole tensor.

    Args:
        shape: Its shape.
        max_elements: Largest size of a box.
    """
    if 0 in shape:
        return
    inner = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The first dimension of which one index is small enough: those before it are taken index by index.
    cut = next((dim for dim, count in enumerate(inner) if count <= max_elements), len(shape) - 1)
    if not shape or prod(shape) <= max_elements:
        yield (0,) * len(shape), shape
        return
    step = max(1, max_elements // inner[cut])
    for outer in range(prod(shape[:cut])):
        index = [outer // prod(shape[dim + 1 : cut]) % shape[dim] for dim in range(cut)]
        for start in range(0, shape[cut], step):
            rest = shape[cut + 1 :]
            yield (*index, start, *(0 for _ in rest)), (*(1 for _ in index), min(step, shape[cut] - start), *rest)


def read_box(source: CheckpointSource, name: str, dtype: torch.dtype, offset: Shape, shape: Shape) -> Tensor:
    """Return a box of a checkpoint's tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        source.read([Piece(name, offset, tensor)])
    return tensor


@contextmanager
def completed_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a free name beside ``target``; the flushed file written there takes its place when the block ends well."""
    path = Path(target).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_checkpoint(
    target: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    fetch: Callable[[str, Shape, Shape], Tensor],
    state: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    boxes: Callable[[TensorInfo], Iterable[Box]],
    num_files: int,
    advance: Advance = silent,
) -> None:
    """Write a checkpoint directory in one process, holding one box at a time.

    Args:
        target: Its name; what stands there is replaced at the end.
        tensors: What it holds, by global name.
        fetch: Returns the values of a box, by name, first index and extent.
        state: Everything else.
        info: See ``Manifest``.
        boxes: Cuts a tensor into the boxes to store.
        num_files: How many files to spread the bytes over.
        advance: Progress.

    Raises:
        CheckpointError: If a value cannot be read or written.
    """
    pieces = [
        Piece(name, offset, torch.empty(shape, dtype=entry.dtype, device="meta"))
        for name, entry in tensors.items()
        for offset, shape in boxes(entry)
    ]

    def fetched(piece: Piece) -> Tensor:
        values = fetch(piece.name, piece.offset, tuple(piece.view.shape))
        advance(values.nbytes)
        return values

    pending = pending_save(target, new_identifier())
    shards: dict[str, list[Shard]] = {name: [] for name in tensors}
    files: dict[str, int] = {}
    with pending.discarded_on_error():
        pending.begin(dump_state(state))
        for number, part in enumerate(_evenly(pieces, num_files)):
            stem = f"tensors.{pending.identifier}.{number:05d}"
            for file in write_shards(pending.folder, stem, part, sum(p.view.nbytes for p in part), fetch=fetched):
                files[file.name] = file.size_bytes
                for name, shard in file.shards:
                    shards[name].append(shard)
        entries = {name: TensorEntry(entry.shape, entry.dtype, tuple(shards[name])) for name, entry in tensors.items()}
        pending.commit(entries, files, info)


def _evenly(pieces: Sequence[Piece], num_parts: int) -> Iterator[list[Piece]]:
    """Divide pieces, in their order, into parts of about equal bytes."""
    total, done = sum(piece.view.nbytes for piece in pieces), 0
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    for piece in pieces:
        middle = done + piece.view.nbytes / 2
        parts[min(num_parts - 1, int(middle * num_parts / total)) if total else 0].append(piece)
        done += piece.view.nbytes
    yield from (part for part in parts if part)
