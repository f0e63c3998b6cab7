"""The manifest of a checkpoint: every tensor's name, shape and dtype, and for every box the file
and the bytes.

``manifest.json`` is a JSON object::

    {"format": "megatron_lightning", "version": 1, "block_bytes": 1048576,
     "files":   {"tensors.5f….00000.000.safetensors": 4096, …},     size of each file in bytes
     "state":   {"file": "state.5f….pt", "checksum": 123},
     "tensors": {"state_dict.layer.weight": {"shape": [8, 16], "dtype": "float32", "shards":
                    [[file index, first byte, [global offset], [shape], [checksum of each block]],
                    …]}, …},
     "info":    {…},                   for display: layout, versions, hyper-parameters
     "checksum": 456}

A shard is stored row-major and little-endian. The shards of a tensor tile the tensor exactly once.
The bytes of a shard are checksummed (CRC-32) in blocks of ``block_bytes``: any part of a shard can
be read and verified. The text is dumped with separators "," and ":". The last entry is the CRC-32
of the text without the last entry. The content is not trusted: names, ranges and tiling are checked
before any file is opened.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any

import torch

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box, Shape

FORMAT, VERSION = "megatron_lightning", 1
BLOCK_BYTES = 1 << 20
_MAX_DIMS, _MAX_ELEMENTS, _MAX_CORNERS = 12, 2**63 - 1, 2**24
_CHECKSUM = ',"checksum":'

# torch dtype name -> code in the header of a safetensors file
DTYPE_CODES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return the manifest's name of a dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_CODES:
        raise CheckpointError(
            f"dtype {name} cannot be stored in a checkpoint; it holds {', '.join(DTYPE_CODES)}."
        )
    return name


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a manifest's name."""
    if name not in DTYPE_CODES:
        raise CheckpointError(
            f"the checkpoint names an unknown dtype {name!r}. Resume from another checkpoint."
        )
    dtype: torch.dtype = getattr(torch, str(name))
    return dtype


@dataclass(frozen=True)
class StoredShard:
    """Place of the bytes of a tensor's box."""

    file: str
    """Name of the file in the checkpoint's directory."""
    start: int
    """First byte in the file."""
    box: Box
    """Range of the global tensor."""
    checksums: tuple[int, ...]
    """CRC-32 of each block of ``BLOCK_BYTES`` bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor of a checkpoint. Comparisons ignore the place of storage."""

    shape: Shape
    """Global shape."""
    dtype: torch.dtype
    """Stored dtype."""
    shards: tuple[StoredShard, ...] = field(default=(), compare=False)
    """Shards to tile the tensor. Empty for a plain file."""

    def num_bytes(self, shape: Shape | None = None) -> int:
        """Return the bytes of a box of this shape, or of the full tensor."""
        return prod(self.shape if shape is None else shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint.

    Raises:
        CheckpointError: If a tensor is not tiled exactly once, or a range lies outside of the file.
    """

    tensors: Mapping[str, TensorInfo]
    """Global name -> tensor."""
    files: Mapping[str, int]
    """File name -> size in bytes. The state file is included."""
    state_file: str
    """File of the non-tensor state."""
    state_checksum: int
    """CRC-32 of the state file."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for display. Nothing is loaded from these values."""

    def __post_init__(self) -> None:
        # A manifest is data from outside: nothing in it may lead to other files or beyond their
        # ends.
        for name in self.files:
            _check(
                _is_plain_name(name), f"file name {name!r} leads out of the checkpoint's directory"
            )
        _check(
            self.state_file in self.files,
            f"the state file {self.state_file!r} is not among the files",
        )
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, entry in self.tensors.items():
            check_tiling(name, entry.shape, [shard.box for shard in entry.shards])
            for shard in entry.shards:
                num_bytes = entry.num_bytes(shard.box.shape)
                ranges.setdefault(shard.file, []).append((shard.start, shard.start + num_bytes))
                _check(
                    shard.file in self.files
                    and shard.start >= 0
                    and shard.start + num_bytes <= self.files[shard.file],
                    f"{name}: bytes {shard.start} to {shard.start + num_bytes} are not inside "
                    f"{shard.file!r}",
                )
                _check(
                    len(shard.checksums) == -(-num_bytes // BLOCK_BYTES),
                    f"{name}: wrong number of checksums",
                )
        # Sorted by begin, two ranges overlap only if neighbors do.
        for file, parts in ranges.items():
            parts.sort()
            for (_, end), (start, _) in pairwise(parts):
                _check(end <= start, f"bytes {start} to {end} of {file!r} belong to two tensors")

    def dumps(self) -> str:
        """Return the content of ``manifest.json``."""
        index = {name: i for i, name in enumerate(self.files)}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "block_bytes": BLOCK_BYTES,
            "files": dict(self.files),
            "state": {"file": self.state_file, "checksum": self.state_checksum},
            "tensors": {
                name: {
                    "shape": entry.shape,
                    "dtype": dtype_name(entry.dtype),
                    "shards": [
                        [index[s.file], s.start, s.box.offset, s.box.shape, s.checksums]
                        for s in entry.shards
                    ],
                }
                for name, entry in self.tensors.items()
            },
            "info": self.info,
        }
        text = json.dumps(body, separators=(",", ":"))
        return f"{text[:-1]}{_CHECKSUM}{zlib.crc32(text.encode())}}}"

    @classmethod
    def loads(cls, text: str | bytes) -> Manifest:
        """Parse and check the content of ``manifest.json``.

        Raises:
            CheckpointError: If the content is damaged, of another format, or contradictory.
        """
        text = text.encode() if isinstance(text, str) else text
        try:
            body = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"manifest.json is damaged ({error}). Resume from another checkpoint."
            ) from error
        # Format and version before the checksum, since another format has another one, and the
        # checksum before the content.
        _check(
            isinstance(body, dict) and body.get("format") == FORMAT,
            f"it is not a {FORMAT} manifest",
        )
        _check(
            body.get("version") == VERSION and body.get("block_bytes") == BLOCK_BYTES,
            f"it has version {body.get('version')!r}, and this release reads {VERSION}; install "
            "the release that wrote it",
        )
        _check(body.get("checksum") == _checksum(text), "its checksum does not match its content")
        try:
            return cls._of_body(body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"manifest.json is malformed ({error!r}). Resume from another checkpoint."
            ) from error

    @classmethod
    def _of_body(cls, body: dict[str, Any]) -> Manifest:
        files = {str(name): _count(size) for name, size in body["files"].items()}
        names = list(files)
        tensors = {}
        for name, entry in body["tensors"].items():
            shards = tuple(
                StoredShard(
                    names[_count(file)],
                    _count(start),
                    Box(_counts(offset), _counts(shape)),
                    _counts(checksums),
                )
                for file, start, offset, shape, checksums in entry["shards"]
            )
            tensors[name] = TensorInfo(_counts(entry["shape"]), dtype_of(entry["dtype"]), shards)
        state, info = body["state"], body["info"]
        _check(isinstance(info, dict), "info is not an object")
        return cls(
            tensors=tensors,
            files=files,
            state_file=state["file"],
            state_checksum=state["checksum"],
            info=info,
        )


def check_tiling(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Check that boxes cover every element of a tensor exactly once.

    A sum of boxes equals a single box if and only if the signed corners agree (the mixed difference
    determines an indicator function). The check takes a single pass over the boxes, without
    comparing pairs of boxes.
    """
    _check(
        len(shape) <= _MAX_DIMS,
        f"{name}: {len(shape)} dims are more than the {_MAX_DIMS} that a checkpoint holds",
    )
    _check(
        prod(max(n, 1) for n in shape) <= _MAX_ELEMENTS,
        f"{name}: shape {shape} is larger than any tensor",
    )
    corners: Counter[Shape] = Counter()
    for box in boxes:
        is_inside = len(box.offset) == len(box.shape) == len(shape) and all(
            n > 0 and o + n <= size for o, n, size in zip(box.offset, box.shape, shape, strict=True)
        )
        _check(
            is_inside,
            f"{name}: a shard of shape {box.shape} at {box.offset} is not inside shape {shape}",
        )
    covered = sum(prod(box.shape) for box in boxes)
    if covered == prod(shape):  # a hostile manifest may have many corners
        # Only dims with a partial box have inner corners, and 2^dims corners a box.
        split = [dim for dim, n in enumerate(shape) if any(box.shape[dim] != n for box in boxes)]
        _check(
            len(boxes) << len(split) <= _MAX_CORNERS,
            f"{name}: {len(boxes)} shards, split in {len(split)} dims, are too many",
        )
        for box in boxes:
            for sign, corner in _corners(
                [box.offset[dim] for dim in split], [box.shape[dim] for dim in split]
            ):
                corners[corner] += sign
        for sign, corner in (
            _corners([0] * len(split), [shape[dim] for dim in split]) if covered else ()
        ):
            corners[corner] -= sign
    if covered != prod(shape) or any(corners.values()):
        raise CheckpointError(
            f"{name}: its {len(boxes)} shards hold {covered} elements and do not cover the "
            f"{prod(shape)} elements of shape {shape} exactly once. Every element needs exactly "
            "one rank that writes it."
        )


def _corners(offset: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, Shape]]:
    ends = [(o, o + n) for o, n in zip(offset, shape, strict=True)]
    return zip(_signs(len(ends)), product(*ends), strict=True)


@lru_cache(maxsize=_MAX_DIMS + 1)
def _signs(num_dims: int) -> tuple[int, ...]:
    return tuple((-1) ** sum(ends) for ends in product((0, 1), repeat=num_dims))


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise CheckpointError(
            f"the checkpoint's manifest cannot be used: {problem}. Resume from another checkpoint."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Repeated names are refused: two readers might see different values."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(
            f"{max(result, key=[name for name, _ in pairs].count)!r} occurs in one object twice"
        )
    return result


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(values: Sequence[object]) -> Shape:
    counts: Any = tuple(values)
    # A checkpoint has millions of checksums.
    if not set(map(type, counts)) <= {int} or (counts and min(counts) < 0):
        raise ValueError(f"{counts!r} are not counts")
    return counts  # type: ignore[no-any-return]


def _checksum(text: bytes) -> int:
    """Return the CRC-32 of the manifest without the last entry, the checksum."""
    body, _, _ = text.rpartition(_CHECKSUM.encode())
    return zlib.crc32(b"}", zlib.crc32(body))
