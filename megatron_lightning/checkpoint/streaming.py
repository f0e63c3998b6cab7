"""Checkpoints larger than memory: tensors read in parts, and new checkpoints whose content is made while it is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.commit import pending_save
from megatron_lightning.checkpoint.files import new_identifier
from megatron_lightning.checkpoint.manifest import Shape, Shard, TensorEntry
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.shard_file import Piece, write_shards
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo
from megatron_lightning.checkpoint.state import dump_state

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


def write_checkpoint(
    target: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    fetch: Callable[[str, Shape, Shape], Tensor],
    state: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    files: Iterable[Sequence[tuple[str, Box]]],
    advance: Advance = silent,
) -> None:
    """Write a checkpoint directory in one process, holding one box at a time.

    Args:
        target: Its name; what stands there is replaced at the end.
        tensors: What it holds, by global name.
        fetch: Returns the values of a box, by name, first index and extent.
        state: Everything else.
        info: See ``Manifest``.
        files: What to store in each file: boxes by the tensor's name; together they tile every tensor.
        advance: Progress.

    Raises:
        CheckpointError: If a value cannot be read or written.
    """

    def piece(name: str, box: Box) -> Piece:
        offset, shape = box
        return Piece(name, offset, torch.empty(shape, dtype=tensors[name].dtype, device="meta"))

    def fetched(piece: Piece) -> Tensor:
        values = fetch(piece.name, piece.offset, tuple(piece.view.shape))
        advance(values.nbytes)
        return values

    pending = pending_save(target, new_identifier())
    shards: dict[str, list[Shard]] = {name: [] for name in tensors}
    sizes: dict[str, int] = {}
    with pending.discarded_on_error():
        pending.begin(dump_state(state))
        for number, content in enumerate(files):
            part = [piece(name, box) for name, box in content]
            stem = f"tensors.{pending.identifier}.{number:05d}"
            for file in write_shards(pending.folder, stem, part, sum(p.view.nbytes for p in part), fetch=fetched):
                sizes[file.name] = file.size_bytes
                for name, shard in file.shards:
                    shards[name].append(shard)
        entries = {name: TensorEntry(entry.shape, entry.dtype, tuple(shards[name])) for name, entry in tensors.items()}
        pending.commit(entries, sizes, info)


def spread_evenly(
    tensors: Mapping[str, TensorInfo], boxes: Callable[[TensorInfo], Iterable[Box]], num_files: int
) -> Iterator[list[tuple[str, Box]]]:
    """Divide the boxes of all tensors, in their order, among files of about equal bytes; yield what each file holds.

    Args:
        tensors: What there is, by global name.
        boxes: Cuts a tensor into the boxes to store.
        num_files: How many files there may be; those that nothing falls to are left out.
    """
    stored = [(name, box) for name, entry in tensors.items() for box in boxes(entry)]
    sizes = [prod(shape) * tensors[name].dtype.itemsize for name, (_, shape) in stored]
    total, done = sum(sizes), 0
    parts: list[list[tuple[str, Box]]] = [[] for _ in range(num_files)]
    for entry, size in zip(stored, sizes, strict=True):
        middle = done + size / 2
        parts[min(num_files - 1, int(middle * num_files / total)) if total else 0].append(entry)
        done += size
    yield from (part for part in parts if part)
