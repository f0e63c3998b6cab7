"""The safetensors files of a rank: written in a single pass with checksums, read by byte range with
verification.

A safetensors file is an 8-byte little-endian length, a JSON header of the given length (name ->
dtype, shape, data_offsets) and the data. Any safetensors reader opens the files. We read through
the manifest with checked ranges, and compare the manifest's dtypes with the header's. On a write, a
thread computes the checksums of a chunk while the previous chunk is written. On a read, a thread
compares the checksums of a chunk while the next chunk is read.
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

from megatron_lightning.checkpoint.format.checksums import BlockChecksums, bad_blocks
from megatron_lightning.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DTYPE_CODES,
    StoredShard,
    dtype_name,
)
from megatron_lightning.checkpoint.format.storage import Folder, RangeReader, read_range
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box, Shape, Shard

_CHUNK_BYTES = 8 * BLOCK_BYTES
_HEADER_BYTES = 1 << 16  # holds hundreds of boxes: one request to an object store


class WrittenFile(NamedTuple):
    """A file written by a rank."""

    name: str
    size_bytes: int
    shards: list[tuple[str, StoredShard]]
    """(tensor name, shard) of the file's content."""


# -------------------------------------------------------------------------------------------- write


def _data(name: str, shard: Shard) -> Tensor:
    return shard.data


def write_shards(
    folder: Folder,
    stem: str,
    shards: Sequence[tuple[str, Shard]],
    max_file_bytes: int,
    *,
    fetch: Callable[[str, Shard], Tensor] = _data,
) -> list[WrittenFile]:
    """Write shards to ``<stem>.<n>.safetensors``, starting a new file before ``max_file_bytes``
    would be exceeded.

    The data may be on any device, contiguous or not: no more than about 16 MiB are copied at a
    time. ``fetch`` returns the data of a shard just before the write.
    """
    batches: list[list[tuple[str, Shard]]] = []
    filled = 0
    # Wide dtypes first keeps every tensor aligned for readers with a memory map.
    for name, shard in sorted(
        (s for s in shards if s[1].data.numel()), key=lambda s: -s[1].data.itemsize
    ):
        if not batches or filled + shard.data.nbytes > max_file_bytes:
            batches.append([])
            filled = 0
        batches[-1].append((name, shard))
        filled += shard.data.nbytes
    with ThreadPoolExecutor(1, "checkpoint-checksums") as thread:
        names = (f"{stem}.{i:03d}.safetensors" for i in range(len(batches)))
        return [
            _write_one(folder, name, batch, fetch, thread)
            for name, batch in zip(names, batches, strict=True)
        ]


def box_name(name: str, box: Box) -> str:
    """Return the name of a box of a tensor in a file."""
    return f"{name}[{','.join(f'{s.start}:{s.stop}' for s in box.slices)}]"


def header_entry(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    """Return the header entry of a tensor of a safetensors file. Bytes are counted from the
    header's end.
    """
    return {
        "dtype": DTYPE_CODES[dtype_name(dtype)],
        "shape": list(shape),
        "data_offsets": [start, stop],
    }


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """Return the beginning of a safetensors file: the header's length, and the header, padded to 8
    bytes.
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_one(
    folder: Folder,
    file: str,
    shards: Sequence[tuple[str, Shard]],
    fetch: Callable[[str, Shard], Tensor],
    thread: ThreadPoolExecutor,
) -> WrittenFile:
    header, position = {}, 0
    for name, shard in shards:
        end = position + shard.data.nbytes
        header[box_name(name, shard.box)] = header_entry(
            shard.data.dtype, shard.box.shape, position, end
        )
        position = end
    begin = header_bytes(header)
    checksums = [BlockChecksums() for _ in shards]

    # The header states all offsets, so it is written before any value is fetched. Checksums run in
    # the thread beside the next chunk's copy and write.
    def content() -> Iterator[bytes | memoryview]:
        yield begin
        pending: Future[None] | None = None
        for (name, shard), checksum in zip(shards, checksums, strict=True):
            for chunk in _chunks(fetch(name, shard).detach()):
                data = chunk.cpu().resolve_conj().resolve_neg().view(torch.uint8).numpy().data
                if pending is not None:
                    pending.result()  # no more than one chunk waits for checksums
                pending = thread.submit(checksum.update, data)
                yield data
        if pending is not None:
            pending.result()

    size_bytes, start = folder.write(file, content()), len(begin)
    stored: list[tuple[str, StoredShard]] = []
    for (name, shard), checksum in zip(shards, checksums, strict=True):
        stored.append((name, StoredShard(file, start, shard.box, checksum.finish())))
        start += shard.data.nbytes
    return WrittenFile(file, size_bytes, stored)


def _chunks(view: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in row-major order as flat contiguous tensors of about
    ``_CHUNK_BYTES``.
    """
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


# --------------------------------------------------------------------------------------------- read


class RangeRead(NamedTuple):
    """Read of at most about 8 MiB from a stored shard into a tensor."""

    shard: StoredShard
    start: int
    """First byte inside the shard."""
    stop: int
    """End of the bytes inside the shard."""
    target: Tensor
    """Destination, flat or of the box's shape. Values are converted to the destination's dtype."""
    strides: Shape
    """Strides of the box in the shard, in elements."""
    dtype: torch.dtype
    """The stored dtype."""

    @property
    def begin(self) -> int:
        """First byte of the first block to read, inside the shard."""
        return self.start // BLOCK_BYTES * BLOCK_BYTES

    @property
    def end(self) -> int:
        """End of the last block to read, inside the shard."""
        return min(
            -(-self.stop // BLOCK_BYTES) * BLOCK_BYTES,
            prod(self.shard.box.shape) * self.dtype.itemsize,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.end - self.begin

    @property
    def is_direct(self) -> bool:
        """Whether the bytes go straight into the target: full blocks, contiguous, in CPU memory."""
        is_full = (self.begin, self.end) == (self.start, self.stop) and self.strides == (1,)
        return is_full and self.target.is_cpu and self.target.dtype == self.dtype


def plan_reads(
    shard: StoredShard, low: Shape, target: Tensor, dtype: torch.dtype
) -> Iterator[RangeRead]:
    """Divide the read of a box into ``target`` into reads of about 8 MiB. ``low`` is the box's
    first index inside the shard.
    """
    extent = tuple(target.shape)
    shape = shard.box.shape
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    # The box spans a range of the shard's bytes, from its first to its last element, with gaps
    # between its rows.
    first = sum(index * stride for index, stride in zip(low, strides, strict=True))
    count = 1 + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True))
    start, stop = first * dtype.itemsize, (first + count) * dtype.itemsize
    # A contiguous range of bytes: split at the begin of checksum blocks.
    if count == target.numel() and target.is_contiguous():
        flat = target.view(-1)
        while start < stop:
            end = min(stop, (start // BLOCK_BYTES * BLOCK_BYTES) + _CHUNK_BYTES)
            num_done = start // dtype.itemsize - first
            yield RangeRead(
                shard,
                start,
                end,
                flat[num_done : num_done + (end - start) // dtype.itemsize],
                (1,),
                dtype,
            )
            start = end
    # Too large to read with its gaps: halve along the outermost dim, so that gaps shrink to those
    # within rows.
    elif stop - start > _CHUNK_BYTES:
        dim = next(dim for dim, n in enumerate(extent) if n > 1)
        half = extent[dim] // 2
        yield from plan_reads(shard, low, target.narrow(dim, 0, half), dtype)
        upper = (*low[:dim], low[dim] + half, *low[dim + 1 :])
        yield from plan_reads(shard, upper, target.narrow(dim, half, extent[dim] - half), dtype)
    else:
        yield RangeRead(shard, start, stop, target, strides, dtype)


class ReadQueue:
    """Reads of a file in order of position, the fastest order. A thread reads while another
    verifies.
    """

    def __init__(self, reader: RangeReader, reads: Iterable[RangeRead], file: str) -> None:
        self._reader = reader
        self._reads = iter(reads)
        self._file = file
        self._turn = threading.Lock()

    def work(self) -> None:
        """Read and verify until no read is left. Any number of threads may call this method.

        Raises:
            CheckpointError: If a block's checksum differs, naming file and bytes.
        """
        # Reused: new memory costs more than the read.
        buffer = torch.empty(0, dtype=torch.uint8)
        while True:
            # The file has one position: reads take turns, and checksums and copies run beside the
            # next read.
            with self._turn:
                range_read = next(self._reads, None)
                if range_read is None:
                    return
                if range_read.is_direct:
                    data = range_read.target.detach().view(torch.uint8)
                else:
                    buffer = (
                        buffer
                        if len(buffer) >= range_read.num_bytes
                        else torch.empty(range_read.num_bytes, dtype=torch.uint8)
                    )
                    data = buffer[: range_read.num_bytes]
                self._reader.read_into(range_read.shard.start + range_read.begin, data.numpy().data)
            _verify(self._file, range_read, data.numpy().data)
            if not range_read.is_direct:
                values = data[
                    range_read.start - range_read.begin : range_read.stop - range_read.begin
                ].view(range_read.dtype)
                range_read.target.detach().copy_(
                    values.as_strided(tuple(range_read.target.shape), range_read.strides)
                )

    def stop(self) -> None:
        """End the threads after their current read."""
        with self._turn:
            self._reads = iter(())


def check_dtypes(
    reader: RangeReader, dtypes: Mapping[int, tuple[str, torch.dtype]], file: str
) -> None:
    """Compare the manifest's dtypes with the dtypes of a file's header. No checksum covers the
    header.

    Args:
        reader: The file.
        dtypes: First byte of a shard -> (tensor name, dtype) in the manifest.
        file: The file's full name, for messages.
    """
    first = min(dtypes)  # the header ends before the first shard
    # A short read mostly has all of the header. A longer header takes a second one.
    data = read_range(reader, 0, min(first, _HEADER_BYTES))
    base = 8 + int.from_bytes(data[:8], "little")
    if len(data) < base <= first:
        data += read_range(reader, len(data), base - len(data))
    try:
        entries = [
            entry for name, entry in json.loads(data[8:base]).items() if name != "__metadata__"
        ]
        codes = {base + entry["data_offsets"][0]: entry["dtype"] for entry in entries}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        codes = {}
    for start, (name, dtype) in dtypes.items():
        if codes.get(start) != DTYPE_CODES[dtype_name(dtype)]:
            raise CheckpointError(
                f"{file} is damaged: its header says that {name} is "
                f"{codes.get(start, 'not there')}, and the manifest that it is "
                f"{dtype_name(dtype)}. Restore the file or resume from another checkpoint."
            )


def _verify(file: str, read: RangeRead, data: memoryview) -> None:
    for first, stop in bad_blocks(data, read.shard.checksums[read.begin // BLOCK_BYTES :]):
        at = read.shard.start + read.begin
        raise CheckpointError(
            f"{file} is damaged: bytes {at + first} to {at + stop} do not match their checksum. "
            "Restore the file or resume from another checkpoint."
        )
