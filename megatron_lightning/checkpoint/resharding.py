"""Rewrite a checkpoint: other files, other boxes, the same content to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from math import prod

from megatron_lightning.checkpoint.manifest import BLOCK_BYTES
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.source import DirectorySource, TensorInfo, open_checkpoint
from megatron_lightning.checkpoint.streaming import PART_BYTES, Box, read_box, slabs, write_checkpoint
from megatron_lightning.errors import ConfigError


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    num_files: int = 1,
    tensor_model_parallel_size: int = 1,
    advance: Advance = silent,
) -> None:
    """Rewrite a checkpoint into ``num_files`` files of equal size; any layout reads it, before and after.

    Args:
        source: A checkpoint directory, or a plain ``.ckpt`` file (whose optimizer states are left out: only the model knows
            the names of the parameters that they number).
        target: The checkpoint directory to write; may be ``source``.
        num_files: Files of tensors.
        tensor_model_parallel_size: Cut matrices into so many blocks of columns, so that a rank of a layout of that tensor
            parallel size (or of a divisor of it) that holds some of the columns reads no others. Rows need no cutting.
        advance: Progress.

    Raises:
        ConfigError: If a number is not positive.
        CheckpointError: If the source is incomplete or damaged.
    """
    for name, number in (("num_files", num_files), ("tensor_model_parallel_size", tensor_model_parallel_size)):
        if number < 1:
            raise ConfigError(f"{name} is {number}, and something has to be written. Set it to 1 or more.")
    opened = open_checkpoint(source)
    stored = opened.tensors()

    def boxes(entry: TensorInfo) -> Iterator[Box]:
        yield from column_boxes(entry, tensor_model_parallel_size)

    write_checkpoint(
        target,
        stored,
        lambda name, offset, shape: read_box(opened, name, stored[name].dtype, offset, shape),
        opened.state(),
        opened.manifest.info if isinstance(opened, DirectorySource) else {},
        boxes=boxes,
        num_files=num_files,
        advance=advance,
    )


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
