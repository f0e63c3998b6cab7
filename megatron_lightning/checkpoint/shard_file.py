"""One rank's safetensors files: written in one pass with checksums, read by byte range with verification.

A safetensors file is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape, data_offsets) and
the data. Any safetensors reader opens the files; we read through the manifest alone, whose ranges are checked. Checksums
are computed in a thread while the bytes before are written, and compared in one while those behind are read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.checkpoint.checksums import BlockChecksums, bad_blocks
from megatron_lightning.checkpoint.manifest import BLOCK_BYTES, DTYPE_CODES, Shape, Shard, dtype_name
from megatron_lightning.checkpoint.storage import Folder, RangeReader
from megatron_lightning.errors import CheckpointError

_CHUNK_BYTES = 8 * BLOCK_BYTES


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


# ---------------------------------------------------------------------------------------------------------------- write


def _held(piece: Piece) -> Tensor:
    return piece.view


def write_shards(
    folder: Folder, stem: str, pieces: Sequence[Piece], max_file_bytes: int, *, fetch: Callable[[Piece], Tensor] = _held
) -> list[WrittenFile]:
    """Write pieces to ``<stem>.<n>.safetensors``, starting a new file when one would exceed ``max_file_bytes``.

    No more than about 16 MiB are copied at a time (to the CPU, or to make them contiguous).

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
    with ThreadPoolExecutor(1, "checkpoint-checksums") as thread:
        names = (f"{stem}.{i:03d}.safetensors" for i in range(len(batches)))
        return [_write_one(folder, name, batch, fetch, thread) for name, batch in zip(names, batches, strict=True)]


def box_name(name: str, offset: Sequence[int], shape: Sequence[int]) -> str:
    """Return what a file calls a box of a tensor."""
    return f"{name}[{','.join(f'{o}:{o + n}' for o, n in zip(offset, shape, strict=True))}]"


def header_entry(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    """Return what the header of a safetensors file says of one tensor; bytes are counted from the header's end."""
    return {"dtype": DTYPE_CODES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [start, stop]}


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """Return the beginning of a safetensors file: the header's length, and the header, which ends at a multiple of 8 bytes."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_one(
    folder: Folder, file: str, pieces: Sequence[Piece], fetch: Callable[[Piece], Tensor], thread: ThreadPoolExecutor
) -> WrittenFile:
    header, position = {}, 0
    for piece in pieces:
        end = position + piece.view.nbytes
        shape = tuple(piece.view.shape)
        header[box_name(piece.name, piece.offset, shape)] = header_entry(piece.view.dtype, shape, position, end)
        position = end
    begin = header_bytes(header)
    checksums = [BlockChecksums() for _ in pieces]

    def content() -> Iterator[bytes | memoryview]:
        yield begin
        pending: Future[None] | None = None
        for piece, checksum in zip(pieces, checksums, strict=True):
            for chunk in _chunks(fetch(piece).detach()):
                data = chunk.cpu().resolve_conj().resolve_neg().view(torch.uint8).numpy().data
                if pending is not None:
                    pending.result()  # no more than one chunk waits for its checksums
                pending = thread.submit(checksum.update, data)
                yield data
        if pending is not None:
            pending.result()

    size_bytes, start = folder.write(file, content()), len(begin)
    shards: list[tuple[str, Shard]] = []
    for piece, checksum in zip(pieces, checksums, strict=True):
        shards.append((piece.name, Shard(file, start, piece.offset, tuple(piece.view.shape), checksum.finish())))
        start += piece.view.nbytes
    return WrittenFile(file, size_bytes, shards)


def _chunks(view: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in row-major order as flat contiguous tensors of about ``_CHUNK_BYTES``."""
    if view.is_contiguous():
        flat, length = view.view(-1), _CHUNK_BYTES // view.itemsize
        for start in range(0, len(flat), length):
            yield flat[start : start + length]
    elif view.nbytes <= _CHUNK_BYTES:
        yield view.contiguous().view(-1)
    elif view.shape[0] == 1:
        yield from _chunks(view[0])
    else:
        rows = max(1, view.shape[0] * _CHUNK_BYTES // view.nbytes)
        for start in range(0, view.shape[0], rows):
            yield from _chunks(view[start : start + rows])


# ----------------------------------------------------------------------------------------------------------------- read


class BoxRead(NamedTuple):
    """Bytes of one shard that go into one tensor; at most about 8 MiB."""

    shard: Shard
    """Where the bytes are."""
    start: int
    """First byte inside the shard."""
    stop: int
    """End of the bytes inside the shard."""
    target: Tensor
    """Where the values go, converted to its dtype: flat, or of the box's shape."""
    strides: Shape
    """Strides of the box in the shard, in elements."""
    dtype: torch.dtype
    """The stored dtype."""

    @property
    def begin(self) -> int:
        """Return the start of the first block that is read, inside the shard."""
        return self.start // BLOCK_BYTES * BLOCK_BYTES

    @property
    def end(self) -> int:
        """Return the end of the last block that is read, inside the shard."""
        return min(-(-self.stop // BLOCK_BYTES) * BLOCK_BYTES, prod(self.shard.shape) * self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Return how many bytes are read."""
        return self.end - self.begin

    @property
    def is_direct(self) -> bool:
        """Whether what is read is what the target holds: whole blocks, in CPU memory, in one piece."""
        whole = (self.begin, self.end) == (self.start, self.stop) and self.strides == (1,)
        return whole and self.target.is_cpu and self.target.dtype == self.dtype


def plan_box(shard: Shard, low: Shape, target: Tensor, dtype: torch.dtype) -> Iterator[BoxRead]:
    """Divide the copy of a box of a shard into an existing tensor into reads of about 8 MiB.

    Args:
        shard: Where the bytes are.
        low: First index of the box inside the shard.
        target: Any view of the box's shape.
        dtype: The stored dtype.
    """
    extent = tuple(target.shape)
    strides = tuple(prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape)))
    first = sum(index * stride for index, stride in zip(low, strides, strict=True))
    count = 1 + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True))
    start, stop = first * dtype.itemsize, (first + count) * dtype.itemsize
    if count == target.numel() and target.is_contiguous():  # one range of bytes: cut where checksums begin
        flat = target.view(-1)
        while start < stop:
            cut = min(stop, (start // BLOCK_BYTES * BLOCK_BYTES) + _CHUNK_BYTES)
            done = start // dtype.itemsize - first
            yield BoxRead(shard, start, cut, flat[done : done + (cut - start) // dtype.itemsize], (1,), dtype)
            start = cut
    elif stop - start > _CHUNK_BYTES:
        dim = next(dim for dim, n in enumerate(extent) if n > 1)
        half = extent[dim] // 2
        yield from plan_box(shard, low, target.narrow(dim, 0, half), dtype)
        upper = (*low[:dim], low[dim] + half, *low[dim + 1 :])
        yield from plan_box(shard, upper, target.narrow(dim, half, extent[dim] - half), dtype)
    else:
        yield BoxRead(shard, start, stop, target, strides, dtype)


class RangeReads:
    """Reads of one file, in its order, which the storage serves best; one thread reads while another verifies.

    Args:
        reader: The shards' file.
        reads: What to read, by rising position.
        file: The file's full name, for messages.
    """

    def __init__(self, reader: RangeReader, reads: Iterable[BoxRead], file: str) -> None:
        self._reader, self._reads, self._file = reader, iter(reads), file
        self._turn = threading.Lock()

    def work(self) -> None:
        """Carry out reads until none is left, verifying every block that they touch; any number of threads may do so.

        Whole blocks go straight into a target in CPU memory; others through a buffer.

        Raises:
            CheckpointError: If a block's checksum differs, naming file and bytes.
        """
        buffer = torch.empty(0, dtype=torch.uint8)  # kept: memory fresh from the system costs more than reading into it
        while True:
            with self._turn:
                read = next(self._reads, None)
                if read is None:
                    return
                if read.is_direct:
                    data = read.target.detach().view(torch.uint8)
                else:
                    buffer = buffer if len(buffer) >= read.num_bytes else torch.empty(read.num_bytes, dtype=torch.uint8)
                    data = buffer[: read.num_bytes]
                self._reader.read_into(read.shard.start + read.begin, data.numpy().data)
            _verify(self._file, read, data.numpy().data)
            if not read.is_direct:
                values = data[read.start - read.begin : read.stop - read.begin].view(read.dtype)
                read.target.detach().copy_(values.as_strided(tuple(read.target.shape), read.strides))

    def stop(self) -> None:
        """Let the threads end after the read that they are at."""
        with self._turn:
            self._reads = iter(())


def _verify(file: str, read: BoxRead, data: memoryview) -> None:
    for first, stop in bad_blocks(data, read.shard.checksums[read.begin // BLOCK_BYTES :]):
        at = read.shard.start + read.begin
        raise CheckpointError(
            f"{file} is damaged: bytes {at + first} to {at + stop} do not match their checksum. Restore the file or "
            "resume from another checkpoint."
        )
