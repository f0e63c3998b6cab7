"""Recompute every checksum of a checkpoint and name the damaged bytes of each file."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron_lightning.checkpoint.format.checksums import bad_blocks
from megatron_lightning.checkpoint.format.manifest import (
    BLOCK_BYTES,
    Manifest,
    StoredShard,
    TensorInfo,
)
from megatron_lightning.checkpoint.format.shard_file import box_name, header_entry
from megatron_lightning.checkpoint.format.storage import (
    Folder,
    RangeReader,
    folder_of,
    opened,
    read_range,
)
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.errors import CheckpointError

_READ_BYTES = 8 * BLOCK_BYTES
_READ_THREADS = 4


class Damage(NamedTuple):
    """A damaged range of a checkpoint."""

    file: str
    """Name of the file."""
    first: int
    """First byte of the range."""
    stop: int
    """Byte after the last."""
    problem: str
    """Description of the damage."""

    def __str__(self) -> str:
        where = f"bytes {self.first} to {self.stop} " if self.stop else ""
        return f"{self.file}: {where}{self.problem}"


_Stored = tuple[str, TensorInfo, StoredShard]  # tensor name, description of the tensor, shard


def verify(path: str | os.PathLike[str], *, advance: Advance = silent) -> list[Damage]:
    """Read a checkpoint directory and return all differences from the manifest, in the order of the
    files.
    """
    folder, manifest = folder_of(path), read_manifest(path)
    stored: dict[str, list[_Stored]] = {name: [] for name in manifest.files}
    for name, info in manifest.tensors.items():
        for shard in info.shards:
            stored[shard.file].append((name, info, shard))

    def check(file: str) -> list[Damage]:
        ordered = sorted(stored[file], key=lambda found: found[2].start)
        return list(_check_file(folder, manifest, file, ordered, advance))

    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return [damage for found in pool.map(check, manifest.files) for damage in found]


def _check_file(
    folder: Folder, manifest: Manifest, file: str, stored: Sequence[_Stored], advance: Advance
) -> Iterator[Damage]:
    size = manifest.files[file]
    try:
        with opened(folder, file, size, once=True) as reader:
            if file == manifest.state_file:
                if zlib.crc32(read_range(reader, 0, size)) != manifest.state_checksum:
                    yield Damage(file, 0, size, "do not match their checksum")
                advance(size)
            else:
                if stored and not _header_matches(reader, stored):
                    yield Damage(
                        file,
                        0,
                        stored[0][2].start,
                        "are not the header that the manifest describes",
                    )
                for name, info, shard in stored:
                    yield from _check_shard(
                        reader, name, shard, info.num_bytes(shard.box.shape), advance
                    )
    except CheckpointError as error:  # missing, truncated, unreadable
        yield Damage(file, 0, 0, str(error))


def _check_shard(
    reader: RangeReader, name: str, shard: StoredShard, length: int, advance: Advance
) -> Iterator[Damage]:
    for begin in range(0, length, _READ_BYTES):
        at, count = shard.start + begin, min(_READ_BYTES, length - begin)
        try:
            data = memoryview(read_range(reader, at, count))
        except CheckpointError:  # later bytes may be sound
            yield Damage(shard.file, at, at + count, f"cannot be read ({name})")
        else:
            for first, stop in bad_blocks(data, shard.checksums[begin // BLOCK_BYTES :]):
                yield Damage(
                    shard.file, at + first, at + stop, f"do not match their checksum ({name})"
                )
        advance(count)


def _header_matches(reader: RangeReader, stored: Sequence[_Stored]) -> bool:
    """Whether the header, used by other safetensors readers, agrees with the manifest."""
    data = bytes(read_range(reader, 0, stored[0][2].start))
    base = 8 + int.from_bytes(data[:8], "little")
    entries = {}
    for name, info, shard in stored:
        start = shard.start - base
        stop = start + info.num_bytes(shard.box.shape)
        entries[box_name(name, shard.box)] = header_entry(info.dtype, shard.box.shape, start, stop)
    try:
        return (
            base <= len(data)
            and {k: v for k, v in json.loads(data[8:base]).items() if k != "__metadata__"}
            == entries
        )
    except ValueError:
        return False
