"""Checkpoints larger than memory: tensors are read box by box, and computed while a new checkpoint
is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.format.files import new_identifier
from megatron_lightning.checkpoint.format.manifest import StoredShard, TensorInfo
from megatron_lightning.checkpoint.format.plain_state import dump_state
from megatron_lightning.checkpoint.format.shard_file import write_shards
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.checkpoint.writing.commit import pending_save
from megatron_lightning.file_names import shard_stem
from megatron_lightning.parallel.shards.spec import Box, Shard

CHUNK_BYTES = 64 << 20
"""Largest box in memory."""


def slabs(info: TensorInfo, max_bytes: int) -> Iterator[Box]:
    """Split a tensor into boxes of at most ``max_bytes``. The row-major bytes of the boxes, in
    order, are the bytes of the full tensor.
    """
    shape, max_elements = info.shape, max(1, max_bytes // info.dtype.itemsize)
    if 0 in shape:
        return
    if prod(shape) <= max_elements:
        yield Box.full(shape)
        return
    inner = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The first dim with a small enough index. Earlier dims are taken index by index.
    split = next(dim for dim, count in enumerate(inner) if count <= max_elements)
    step, inner_shape = max_elements // inner[split], shape[split + 1 :]
    for index in product(*map(range, shape[:split])):
        for start in range(0, shape[split], step):
            offset = (*index, start, *(0 for _ in inner_shape))
            yield Box(offset, (*(1 for _ in index), min(step, shape[split] - start), *inner_shape))


def read_box(source: CheckpointSource, name: str, dtype: torch.dtype, box: Box) -> Tensor:
    """Return a box of a checkpoint's tensor."""
    tensor = torch.empty(box.shape, dtype=dtype)
    if tensor.numel():
        source.read([(name, Shard(box.offset, tensor))])
    return tensor


def write_checkpoint(
    target: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    fetch: Callable[[str, Box], Tensor],
    state: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    files: Iterable[Sequence[tuple[str, Box]]],
    advance: Advance = silent,
) -> None:
    """Write a checkpoint directory in a single process, with a single box in memory at a time.

    Args:
        target: Name of the checkpoint. An existing checkpoint is replaced at the end.
        tensors: The tensors, by global name.
        fetch: Returns the values of a box, given the tensor's name and the box.
        state: Everything else.
        info: See ``Manifest``.
        files: (tensor name, box) pairs of each file. All pairs together tile every tensor.
        advance: Progress.
    """

    def fetched(name: str, shard: Shard) -> Tensor:
        values = fetch(name, shard.box)
        advance(values.nbytes)
        return values

    pending = pending_save(target, new_identifier())
    shards: dict[str, list[StoredShard]] = {name: [] for name in tensors}
    sizes: dict[str, int] = {}
    with pending.discarded_on_error():
        pending.begin(dump_state(state))
        for number, content in enumerate(files):
            meta = (
                (n, b, torch.empty(b.shape, dtype=tensors[n].dtype, device="meta"))
                for n, b in content
            )
            # Shapes without memory: the writer needs sizes for the header, and fetches one box at a
            # time.
            placeholders = [
                (name, Shard(box.offset, placeholder)) for name, box, placeholder in meta
            ]
            stem = shard_stem(pending.identifier, number)
            for file in write_shards(
                pending.folder,
                stem,
                placeholders,
                sum(s.data.nbytes for _, s in placeholders),
                fetch=fetched,
            ):
                sizes[file.name] = file.size_bytes
                for name, shard in file.shards:
                    shards[name].append(shard)
        stored = {
            name: replace(entry, shards=tuple(shards[name])) for name, entry in tensors.items()
        }
        pending.commit(stored, sizes, info)


def spread_evenly(
    tensors: Mapping[str, TensorInfo], boxes: Callable[[TensorInfo], Iterable[Box]], num_files: int
) -> Iterator[list[tuple[str, Box]]]:
    """Divide the boxes of all tensors, in order, among at most ``num_files`` files of about equal
    bytes. Yield the boxes of each file.
    """
    stored = [(name, box) for name, info in tensors.items() for box in boxes(info)]
    sizes = [tensors[name].num_bytes(box.shape) for name, box in stored]
    total, num_elements = sum(sizes), 0
    files: list[list[tuple[str, Box]]] = [[] for _ in range(num_files)]
    for entry, size in zip(stored, sizes, strict=True):
        middle = num_elements + size / 2
        files[min(num_files - 1, int(middle * num_files / total)) if total else 0].append(entry)
        num_elements += size
    yield from filter(None, files)
