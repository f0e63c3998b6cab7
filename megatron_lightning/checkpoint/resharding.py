"""Rewrite a checkpoint: other files, other boxes, the same content to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from megatron_lightning.checkpoint.manifest import BLOCK_BYTES, Manifest, Shape, TensorEntry
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.source import DirectorySource, TensorInfo, open_checkpoint
from megatron_lightning.checkpoint.streaming import PART_BYTES, Box, read_box, slabs, spread_evenly, write_checkpoint
from megatron_lightning.checkpoint.verification import read_manifest
from megatron_lightning.errors import CheckpointError, ConfigError


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    num_files: int = 1,
    tensor_model_parallel_size: int = 1,
    like: str | os.PathLike[str] | None = None,
    advance: Advance = silent,
) -> None:
    """Rewrite a checkpoint into other files; any layout reads it, before and after.

    Args:
        source: A checkpoint directory, or a plain ``.ckpt`` file (whose optimizer states are left out: only the model knows
            the names of the parameters that they number).
        target: The checkpoint directory to write; may be ``source``.
        num_files: Files of tensors, of about equal size.
        tensor_model_parallel_size: Cut matrices into so many blocks of columns, so that a rank of a layout of that tensor
            parallel size (or of a divisor of it) that holds some of the columns reads no others. Rows need no cutting.
        like: Instead of the two numbers: a checkpoint that was saved under the layout that will read this one (of a first step,
            say). Each rank then finds in one file what it would have written itself: what its tensor, pipeline and virtual
            stages and its share among the data-parallel ranks are made of.
        advance: Progress.

    Raises:
        ConfigError: If a number is not positive, or there are numbers beside ``like``.
        CheckpointError: If the source is incomplete or damaged, or ``like`` is not of the same model and optimizers.
    """
    for name, number in (("num_files", num_files), ("tensor_model_parallel_size", tensor_model_parallel_size)):
        if number < 1:
            raise ConfigError(f"{name} is {number}, and something has to be written. Set it to 1 or more.")
    if like is not None and (num_files, tensor_model_parallel_size) != (1, 1):
        raise ConfigError(f"like={like} says how many files there are and how they are cut. Leave the numbers out.")
    opened = open_checkpoint(source)
    stored = opened.tensors()
    info = dict(opened.manifest.info) if isinstance(opened, DirectorySource) else {}
    if like is None:
        files = spread_evenly(stored, lambda entry: column_boxes(entry, tensor_model_parallel_size), num_files)
    else:
        template = read_manifest(like)
        info |= {key: template.info[key] for key in ("layout", "world_size") if key in template.info}
        files = files_of_ranks(template, stored, str(like))
    write_checkpoint(
        target,
        stored,
        lambda name, offset, shape: read_box(opened, name, stored[name].dtype, offset, shape),
        opened.state(),
        info,
        files=files,
        advance=advance,
    )


def files_of_ranks(template: Manifest, stored: Mapping[str, TensorInfo], path: str) -> Iterator[list[tuple[str, Box]]]:
    """Yield what each rank that wrote the checkpoint ``template`` holds of the tensors, in parts of about 64 MiB.

    Args:
        template: Manifest of the checkpoint.
        stored: The tensors to store.
        path: The template's name, for messages.

    Raises:
        CheckpointError: If they are not the template's, by name and shape.
    """
    differing = sorted(name for name in {*stored, *template.tensors} if _shape(stored, name) != _shape(template.tensors, name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{path} is of another model: {len(differing)} tensors differ, the first is {name}: "
            f"{_shape(template.tensors, name)} there, {_shape(stored, name)} here. "
            "Save one of the same model and optimizers under the layout you want."
        )
    ranks: dict[str, list[tuple[str, Box]]] = {}
    for name, entry in template.tensors.items():
        for shard in entry.shards:
            parts = slabs(shard.shape, max(1, PART_BYTES // stored[name].dtype.itemsize))
            boxes = [(name, (tuple(a + b for a, b in zip(shard.offset, o, strict=True)), extent)) for o, extent in parts]
            ranks.setdefault(shard.file.rsplit(".", 2)[0], []).extend(boxes)  # a rank may have several files
    yield from (ranks[rank] for rank in sorted(ranks))


def _shape(tensors: Mapping[str, TensorInfo | TensorEntry], name: str) -> Shape | None:
    return tensors[name].shape if name in tensors else None


def column_boxes(entry: TensorInfo, num_columns: int) -> Iterator[Box]:
    """Cut a tensor along every dim but the first, where that dim divides evenly and a box keeps a block of checksum."""
    shape, itemsize = entry.shape, entry.dtype.itemsize
    counts = [1] * len(shape)
    for dim in range(1, len(shape)):
        if shape[dim] % num_columns == 0 and prod(shape) // prod(counts) * itemsize >= num_columns * BLOCK_BYTES:
            counts[dim] = num_columns
    extent = tuple(n // count for n, count in zip(shape, counts, strict=True))
    for index in product(*(range(count) for count in counts)):
        corner = tuple(i * n for i, n in zip(index, extent, strict=True))
        for offset, part in slabs(extent, max(1, PART_BYTES // itemsize)):
            yield tuple(a + b for a, b in zip(corner, offset, strict=True)), part
