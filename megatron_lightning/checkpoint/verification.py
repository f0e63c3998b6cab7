"""Recompute every checksum of a checkpoint and say which bytes of which file are bad."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron_lightning.checkpoint.checksums import bad_blocks
from megatron_lightning.checkpoint.commit import MANIFEST
from megatron_lightning.checkpoint.manifest import BLOCK_BYTES, Manifest, Shard, TensorEntry
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.shard_file import box_name, header_entry
from megatron_lightning.checkpoint.source import manifest_text
from megatron_lightning.checkpoint.storage import Folder, RangeReader, folder_of, is_plain_file, opened, read_range
from megatron_lightning.errors import CheckpointError, MissingCheckpointError

_READ_BYTES = 8 * BLOCK_BYTES


class Damage(NamedTuple):
    """A part of a checkpoint that is not what was written."""

    file: str
    """Name of the file."""
    first: int
    """First byte of the range."""
    stop: int
    """Byte after the last."""
    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        where = f"bytes {self.first} to {self.stop} " if self.stop else ""
        return f"{self.file}: {where}{self.problem}"


class _Part(NamedTuple):
    tensor: str
    entry: TensorEntry
    shard: Shard


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the checked manifest of a checkpoint directory.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    if is_plain_file(path):
        raise CheckpointError(f"{path} is a plain file, which has neither manifest nor checksums. Name a checkpoint directory.")
    folder = folder_of(path)
    sizes = folder.sizes()
    if MANIFEST not in sizes:
        if not sizes:
            raise MissingCheckpointError.at(path)
        raise CheckpointError(f"{path} has no {MANIFEST}, so it is not a committed checkpoint directory. Name one that is.")
    try:
        return Manifest.loads(manifest_text(folder, sizes[MANIFEST]))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def verify(path: str | os.PathLike[str], *, num_threads: int = 4, advance: Advance = silent) -> list[Damage]:
    """Read a whole checkpoint directory and compare it with its manifest.

    Args:
        path: The directory.
        num_threads: Files read at the same time.
        advance: Progress, in bytes read.

    Returns:
        Everything that differs, in the order of the files; empty for a sound checkpoint.

    Raises:
        CheckpointError: If the manifest itself is missing or damaged, so that there is nothing to compare with.
    """
    folder, manifest = folder_of(path), read_manifest(path)
    parts: dict[str, list[_Part]] = {name: [] for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for shard in entry.shards:
            parts[shard.file].append(_Part(name, entry, shard))

    def check(file: str) -> list[Damage]:
        ordered = sorted(parts[file], key=lambda part: part.shard.start)
        return list(_check_file(folder, manifest, file, ordered, advance))

    with ThreadPoolExecutor(num_threads) as pool:
        return [damage for found in pool.map(check, manifest.files) for damage in found]


def _check_file(folder: Folder, manifest: Manifest, file: str, parts: Sequence[_Part], advance: Advance) -> Iterator[Damage]:
    size = manifest.files[file]
    try:
        with opened(folder, file, size, once=True) as reader:
            if file == manifest.state_file:
                if zlib.crc32(read_range(reader, 0, size)) != manifest.state_checksum:
                    yield Damage(file, 0, size, "do not match their checksum")
                advance(size)
            else:
                if parts and not _header_matches(reader, parts):
                    yield Damage(file, 0, parts[0].shard.start, "are not the header that the manifest describes")
                for part in parts:
                    yield from _check_part(reader, file, part, advance)
    except CheckpointError as error:  # missing, truncated, unreadable
        yield Damage(file, 0, 0, str(error))


def _check_part(reader: RangeReader, file: str, part: _Part, advance: Advance) -> Iterator[Damage]:
    shard, length = part.shard, part.entry.num_bytes(part.shard.shape)
    for begin in range(0, length, _READ_BYTES):
        at, count = shard.start + begin, min(_READ_BYTES, length - begin)
        try:
            data = memoryview(read_range(reader, at, count))
        except CheckpointError:  # what comes after it may be sound
            yield Damage(file, at, at + count, f"cannot be read ({part.tensor})")
        else:
            for first, stop in bad_blocks(data, shard.checksums[begin // BLOCK_BYTES :]):
                yield Damage(file, at + first, at + stop, f"do not match their checksum ({part.tensor})")
        advance(count)


def _header_matches(reader: RangeReader, parts: Sequence[_Part]) -> bool:
    """Whether other readers of safetensors find in the file what the manifest says."""
    data = bytes(read_range(reader, 0, parts[0].shard.start))
    base = 8 + int.from_bytes(data[:8], "little")
    expected = {}
    for name, entry, shard in parts:
        start = shard.start - base
        stop = start + entry.num_bytes(shard.shape)
        expected[box_name(name, shard.offset, shard.shape)] = header_entry(entry.dtype, shard.shape, start, stop)
    try:
        return base <= len(data) and {k: v for k, v in json.loads(data[8:base]).items() if k != "__metadata__"} == expected
    except ValueError:
        return False
