"""The header of a safetensors file, checked before a byte of data is trusted.

Format (https://github.com/huggingface/safetensors): an 8-byte little-endian length, a JSON header
of this length (name -> dtype, shape, data_offsets), and the data. Data offsets count from the
header's end, cover the data without gaps, and never overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_lightning.checkpoint.format.manifest import DTYPE_CODES
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Shape

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
DTYPES: Mapping[str, torch.dtype] = {
    code: getattr(torch, name) for name, code in DTYPE_CODES.items()
}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: Shape
    start: int
    """First byte in the file."""
    stop: int


class Header(NamedTuple):
    """The begin of a file, and the tensors described by position."""

    text: bytes
    """Length and JSON, as in the file."""
    tensors: tuple[StoredTensor, ...]


def read_header(path: Path) -> Header:
    """Return the checked header of a file.

    Raises:
        CheckpointError: If the header is damaged, or describes other data than the file has.
    """
    try:
        with path.open("rb") as stream:
            return _read(stream, path.stat().st_size, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Restore the file.") from error


def _read(stream: BinaryIO, size: int, path: Path) -> Header:
    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES or size < 8 + length:
        raise _damaged(
            path, f"a header of {length:,} bytes does not fit into a file of {size:,} bytes"
        )
    return parse_header(length.to_bytes(8, "little") + stream.read(length), size, path)


def parse_header(text: bytes, size: int | None, path: Path) -> Header:
    """Return the checked header of a file.

    Args:
        text: Length and JSON.
        size: Bytes of the file. None: the file is not here.
        path: The file, for messages.

    Raises:
        CheckpointError: If the header is damaged, or describes other data than the file has.
    """
    length = len(text) - 8
    try:
        entries = json.loads(text[8:], object_pairs_hook=unique_entries)
        entries.pop("__metadata__", None)
        tensors = [_tensor(name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be parsed ({error})") from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = 8 + length
    # Sorted by position, the data must be without gaps and overlaps, as the format demands.
    for tensor in tensors:
        num_bytes = prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.start != end or tensor.stop - tensor.start != num_bytes:
            raise _damaged(
                path,
                f"{tensor.name} of shape {list(tensor.shape)} in {tensor.dtype} lies at bytes "
                f"{tensor.start:,} to {tensor.stop:,}, and {num_bytes:,} bytes from {end:,} on "
                "were expected",
            )
        end = tensor.stop
    if size is not None and end != size:
        raise _damaged(path, f"its header describes {end:,} bytes, and the file has {size:,}")
    return Header(text, tuple(tensors))


def unique_entries(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of a JSON object: an ``object_pairs_hook`` that refuses repeated names.

    Raises:
        ValueError: If a name appears twice.
    """
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name appears twice")
    return entries


def _tensor(name: str, entry: Any, base: int) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r}")
    if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
        raise ValueError(f"{name} has shape {shape!r} and data_offsets {[start, stop]!r}")
    return StoredTensor(name, DTYPES[dtype], tuple(shape), base + start, base + stop)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}. Download or restore the file.")
