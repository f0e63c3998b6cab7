"""Rewrite a checkpoint into other files and boxes, with bit-equal content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from megatron_lightning.checkpoint.format.manifest import BLOCK_BYTES, Manifest, TensorInfo
from megatron_lightning.checkpoint.format.streaming import (
    CHUNK_BYTES,
    read_box,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.reading.source import DirectorySource, open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box, Shape


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    num_files: int = 1,
    tensor_model_parallel_size: int = 1,
    like: str | os.PathLike[str] | None = None,
    advance: Advance = silent,
) -> None:
    """Rewrite a checkpoint into other files, as described for ``commands.reshard``. ``target`` may
    be ``source``.
    """
    for name, number in (
        ("num_files", num_files),
        ("tensor_model_parallel_size", tensor_model_parallel_size),
    ):
        if number < 1:
            raise ConfigError(f"{name} is {number}; it must be a positive integer.")
    if like is not None and (num_files, tensor_model_parallel_size) != (1, 1):
        raise ConfigError(
            f"like={like} says how many files there are and how they are split. Leave the numbers "
            "out."
        )
    opened = open_checkpoint(source)
    stored = opened.tensors()
    info = dict(opened.manifest.info) if isinstance(opened, DirectorySource) else {}
    if like is None:
        files = spread_evenly(
            stored, lambda info: column_boxes(info, tensor_model_parallel_size), num_files
        )
    else:
        template = read_manifest(like)
        info |= {
            key: template.info[key] for key in ("layout", "world_size") if key in template.info
        }
        files = files_of_ranks(template, stored, str(like))
    write_checkpoint(
        target,
        stored,
        lambda name, box: read_box(opened, name, stored[name].dtype, box),
        opened.state(),
        info,
        files=files,
        advance=advance,
    )


def files_of_ranks(
    template: Manifest, stored: Mapping[str, TensorInfo], path: str
) -> Iterator[list[tuple[str, Box]]]:
    """Yield for each rank of the checkpoint ``template`` the boxes written by the rank, in slabs of
    about 64 MiB of ``stored``.

    Raises:
        CheckpointError: If the tensors differ in name or shape from the template at ``path``.
    """
    differing = sorted(
        name
        for name in {*stored, *template.tensors}
        if _shape(stored, name) != _shape(template.tensors, name)
    )
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{path} is of another model: {len(differing)} tensors differ, the first is {name}: "
            f"{_shape(template.tensors, name)} there, {_shape(stored, name)} here. "
            "Save one of the same model and optimizers under the layout you want."
        )
    ranks: dict[str, list[tuple[str, Box]]] = {}
    for name, info in template.tensors.items():
        for shard in info.shards:
            slabs_of_shard = slabs(TensorInfo(shard.box.shape, stored[name].dtype), CHUNK_BYTES)
            boxes = [(name, slab.shifted(shard.box.offset)) for slab in slabs_of_shard]
            # A rank may have several files.
            ranks.setdefault(shard.file.rsplit(".", 2)[0], []).extend(boxes)
    yield from (ranks[rank] for rank in sorted(ranks))


def _shape(tensors: Mapping[str, TensorInfo], name: str) -> Shape | None:
    return tensors[name].shape if name in tensors else None


def column_boxes(info: TensorInfo, num_columns: int) -> Iterator[Box]:
    """Split a tensor along every dim but the first, if the dim divides evenly and a box keeps at
    least a block of checksum.
    """
    shape = info.shape
    counts = [1] * len(shape)
    for dim in range(1, len(shape)):
        if (
            shape[dim] % num_columns == 0
            and info.num_bytes() // prod(counts) >= num_columns * BLOCK_BYTES
        ):
            counts[dim] = num_columns
    extent = tuple(n // count for n, count in zip(shape, counts, strict=True))
    for index in product(*(range(count) for count in counts)):
        corner = tuple(i * n for i, n in zip(index, extent, strict=True))
        for slab in slabs(TensorInfo(extent, info.dtype), CHUNK_BYTES):
            yield slab.shifted(corner)
