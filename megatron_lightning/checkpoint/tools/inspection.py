"""Describe the content of a checkpoint without reading tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.reading.source import (
    CheckpointSource,
    DirectorySource,
    open_checkpoint,
)


def describe(path: str | os.PathLike[str], *, tensors: str | None = None) -> str:
    """Return a human-readable description of a checkpoint.

    Args:
        path: A checkpoint directory or a plain ``.ckpt`` file.
        tensors: List every tensor with a global name matching this pattern (``"*"`` for all). None:
            totals only.
    """
    source = open_checkpoint(path)
    stored = source.tensors()
    lines = [f"{path}: {_kind(source)}"]
    lines += [f"  {key}: {_short(value)}" for key, value in _facts(source)]
    groups = [_row(name, entries) for name, entries in _groups(stored).items()]
    lines += ["", *_table(["tensors", "number", "elements", "size", "dtypes"], groups)]
    lines += ["", "state: " + (", ".join(sorted(source.state())) or "nothing")]
    if tensors is not None:
        rows = [
            [
                name,
                "x".join(map(str, entry.shape)) or "scalar",
                _dtype(entry),
                str(len(entry.shards) or 1),
            ]
            for name, entry in stored.items()
            if fnmatchcase(name, tensors)
        ]
        lines += ["", *_table(["tensor", "shape", "dtype", "boxes"], rows)]
    return "\n".join(lines)


def contents(path: str | os.PathLike[str], *, tensors: str | None = None) -> dict[str, Any]:
    """Return the description of a checkpoint as plain values.

    Args:
        path: A checkpoint directory or a plain ``.ckpt`` file.
        tensors: List every tensor with a global name matching this pattern. None: an empty list.
    """
    source = open_checkpoint(path)
    stored = source.tensors()
    files = source.manifest.files if isinstance(source, DirectorySource) else None
    return {
        "path": str(path),
        "files": None if files is None else len(files),
        "bytes": None if files is None else sum(files.values()),
        "info": dict(_facts(source)),
        "groups": {
            name: {
                "tensors": len(entries),
                "elements": sum(prod(entry.shape) for entry in entries),
                "bytes": sum(entry.num_bytes() for entry in entries),
                "dtypes": sorted({_dtype(entry) for entry in entries}),
            }
            for name, entries in _groups(stored).items()
        },
        "state": sorted(source.state()),
        "tensors": [
            {
                "name": name,
                "shape": list(entry.shape),
                "dtype": _dtype(entry),
                "boxes": len(entry.shards) or 1,
            }
            for name, entry in stored.items()
            if tensors is not None and fnmatchcase(name, tensors)
        ],
    }


def readable_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _kind(source: CheckpointSource) -> str:
    if not isinstance(source, DirectorySource):
        return "a plain file; optimizer states are not listed"
    files = source.manifest.files
    return f"{len(files)} files, {readable_bytes(sum(files.values()))}, committed"


def _facts(source: CheckpointSource) -> Iterator[tuple[str, Any]]:
    if isinstance(source, DirectorySource):
        yield from source.manifest.info.items()
    else:
        state = source.state()
        yield from (
            (key, state[key])
            for key in ("epoch", "global_step", "pytorch-lightning_version")
            if key in state
        )


def _groups(stored: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the tensors of each kind: the module's tensors, each state key of an optimizer, and
    all.
    """
    groups: dict[str, list[TensorInfo]] = {}
    for name, entry in stored.items():
        key, _, name_inside = name.partition(".")
        if key == "optimizer_states":
            key = f"{key}.{name_inside.partition('.')[0]}: {name.rpartition('.')[2]}"
        groups.setdefault(key, []).append(entry)
    return {**groups, "all": list(stored.values())}


def _row(name: str, entries: Sequence[TensorInfo]) -> list[str]:
    elements = sum(prod(entry.shape) for entry in entries)
    size = sum(entry.num_bytes() for entry in entries)
    dtypes = ", ".join(sorted({_dtype(entry) for entry in entries}))
    return [name, str(len(entries)), f"{elements:,}", readable_bytes(size), dtypes]


def _dtype(entry: TensorInfo) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
