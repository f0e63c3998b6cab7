"""One rank's safetensors files: written in one pass with checksums, read by byte range with verification.

A safetensors file is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape, data_offsets) and
the data. Any safetensors reader opens the files; we read through the manifest alone, whose ranges are checked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.checkpoint.manifest import BLOCK_BYTES, DTYPE_CODES, Shape, Shard, dtype_name
from megatron_lightning.checkpoint.storage import RangeReader, write_file
from megatron_lightning.errors import CheckpointError

_READ_BYTES = 8 * BLOCK_BYTES


class Piece(NamedTuple):
    """A box of a tensor in this rank's memory."""

    name: str
    """Global name of the tensor."""
    offset: Shape
    """First index in the global tensor."""
    view: Tensor
    """Its values, on any device, contiguous or not."""


class WrittenFile(NamedTuple):
    """A file that a rank wrote."""

    name: str
    """File name."""
    size_bytes: int
    """Its size."""
    shards: list[tuple[str, Shard]]
    """(tensor name, box) of everything in it."""


def _held(piece: Piece) -> Tensor:
    return piece.view


def write_shards(
    folder: Path, stem: str, pieces: Sequence[Piece], max_file_bytes: int, *, fetch: Callable[[Piece], Tensor] = _held
) -> list[WrittenFile]:
    """Write pieces to ``<stem>.<n>.safetensors``, starting a new file when one would exceed ``max_file_bytes``.

    At most one piece is copied at a time (to the CPU, or to make it contiguous).

    Args:
        folder: Where to.
        stem: Beginning of the file names.
        pieces: What to write.
        max_file_bytes: Largest size of a file.
        fetch: Returns a piece's values when they are written; those in memory if it is not given.
    """
    batches: list[list[Piece]] = []
    filled = 0
    # Wide dtypes first keeps every tensor aligned for readers that map the file.
    for piece in sorted((p for p in pieces if p.view.numel()), key=lambda p: -p.view.itemsize):
        if not batches or filled + piece.view.nbytes > max_file_bytes:
            batches.append([])
            filled = 0
        batches[-1].append(piece)
        filled += piece.view.nbytes
    return [_write_one(folder, f"{stem}.{i:03d}.safetensors", batch, fetch) for i, batch in enumerate(batches)]


def _write_one(folder: Path, file: str, pieces: Sequence[Piece], fetch: Callable[[Piece], Tensor]) -> WrittenFile:
    header, position = {}, 0
    for piece in pieces:
        end = position + piece.view.nbytes
        box = ",".join(f"{o}:{o + n}" for o, n in zip(piece.offset, piece.view.shape, strict=True))
        code, shape = DTYPE_CODES[dtype_name(piece.view.dtype)], list(piece.view.shape)
        header[f"{piece.name}[{box}]"] = {"dtype": code, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    shards: list[tuple[str, Shard]] = []

    def content() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        start = 8 + len(text)
        for piece in pieces:
            data = _bytes_of(fetch(piece))
            checksums = tuple(zlib.crc32(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES))
            shards.append((piece.name, Shard(file, start, piece.offset, tuple(piece.view.shape), checksums)))
            yield data
            start += len(data)

    return WrittenFile(file, write_file(folder / file, content()), shards)


def _bytes_of(view: Tensor) -> memoryview:
    return view.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_box(reader: RangeReader, shard: Shard, low: Shape, target: Tensor, dtype: torch.dtype) -> None:
    """Copy a box of a shard into an existing tensor, verifying every block that is read.

    A large box is read in parts of about 8 MiB, so that memory stays flat.

    Args:
        reader: The shard's file.
        shard: Where the bytes are.
        low: First index of the box inside the shard.
        target: Any view of the box's shape; values are converted to its dtype.
        dtype: The stored dtype.

    Raises:
        CheckpointError: If a block's checksum differs, naming file and bytes.
    """
    extent = tuple(target.shape)
    strides = [prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))]
    first = sum(index * stride for index, stride in zip(low, strides, strict=True))
    count = 1 + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True))
    start, stop = first * dtype.itemsize, (first + count) * dtype.itemsize
    if stop - start > _READ_BYTES:
        dim = next(dim for dim, n in enumerate(extent) if n > 1)
        half = extent[dim] // 2
        read_box(reader, shard, low, target.narrow(dim, 0, half), dtype)
        upper = (*low[:dim], low[dim] + half, *low[dim + 1 :])
        read_box(reader, shard, upper, target.narrow(dim, half, extent[dim] - half), dtype)
        return
    begin = start // BLOCK_BYTES * BLOCK_BYTES
    end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, prod(shard.shape) * dtype.itemsize)
    buffer = reader.read(shard.start + begin, end - begin)
    _verify(reader, shard, begin, buffer)
    values = torch.frombuffer(buffer, dtype=torch.uint8)[start - begin : stop - begin].view(dtype)
    target.copy_(values.as_strided(extent, strides))


def _verify(reader: RangeReader, shard: Shard, begin: int, buffer: bytearray) -> None:
    view = memoryview(buffer)
    for position in range(0, len(view), BLOCK_BYTES):
        block = view[position : position + BLOCK_BYTES]
        if zlib.crc32(block) != shard.checksums[(begin + position) // BLOCK_BYTES]:
            at = shard.start + begin + position
            raise CheckpointError(
                f"{reader.path} is damaged: bytes {at} to {at + len(block)} do not match their checksum. Restore the file or "
                "resume from another checkpoint."
            )
