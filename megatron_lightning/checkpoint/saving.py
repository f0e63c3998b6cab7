"""Write the tensors of all ranks as one checkpoint: a snapshot, taken while training waits, and its writing, which need not."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from megatron_lightning import __version__
from megatron_lightning.checkpoint.agreement import ALONE, gather, on_first_rank, together
from megatron_lightning.checkpoint.commit import PendingSave, pending_save
from megatron_lightning.checkpoint.files import new_identifier
from megatron_lightning.checkpoint.manifest import Shape, Shard, TensorEntry, dtype_name
from megatron_lightning.checkpoint.shard_file import Piece, WrittenFile, write_shards
from megatron_lightning.checkpoint.sharded import TensorShards, own_parts
from megatron_lightning.checkpoint.state import dump_state
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup

_MAX_FILE_BYTES = 4 << 30


def save_sharded(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorShards],
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: AxisGroup = ALONE,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint directory; all ranks of ``group`` call this, and all return once it is committed.

    What stood under ``path`` before stays readable until then, and stays for good if any rank fails.

    Args:
        path: The directory, on a file system that all ranks share.
        tensors: What this rank holds; may be a generator, whose errors are reported like those of writing.
        state: Everything else, as the first rank has it (see ``state`` for what it may hold).
        info: Layout, hyper-parameters, consumed samples …: shown to people, stored as JSON (text where it is not).
        group: The ranks that save together.
        max_file_bytes: A rank starts another file beyond this size.

    Raises:
        CheckpointError: On every rank, if one of them failed, the state has no plain form, or the tensors written by all
            ranks do not cover each global tensor exactly once.
    """
    write_snapshot(take_snapshot(path, tensors, state, info=info, group=group), group, max_file_bytes)


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of a checkpoint, collected while nothing changes it."""

    path: str
    """The checkpoint's name."""
    identifier: str
    """Id of this save, the same on all ranks."""
    state: bytes
    """Content of the state file on the first rank."""
    pieces: tuple[Piece, ...]
    """What this rank writes; views of the live tensors, unless they were copied since."""
    tensors: Mapping[str, tuple[Shape, torch.dtype]]
    """Shape and dtype of every tensor that this rank has a part in."""
    info: Mapping[str, Any]
    """See ``Manifest``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.view.nbytes for piece in self.pieces)


def take_snapshot(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorShards],
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: AxisGroup = ALONE,
) -> Snapshot:
    """Collect what a save writes; all ranks of ``group`` call this. For arguments and errors see :func:`save_sharded`."""

    def collect() -> Snapshot:
        held = [shards for shards in tensors if shards.writes]
        described = {shards.name: (shards.global_shape, shards.dtype) for shards in held}
        for _, dtype in described.values():
            dtype_name(dtype)
        pieces = tuple(part for shards in held for part in own_parts(shards))
        data = dump_state(state) if group.rank == 0 else b""
        return Snapshot(str(path), "", data, pieces, described, _as_json(info or {}))

    snapshot = together(group, f"saving {path}", collect)
    return replace(snapshot, identifier=on_first_rank(group, new_identifier))


def write_snapshot(snapshot: Snapshot, group: AxisGroup = ALONE, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
    """Write a snapshot and commit it; all ranks of ``group`` call this. For errors see :func:`save_sharded`."""
    pending = pending_save(snapshot.path, snapshot.identifier)
    with pending.discarded_on_error():
        on_first_rank(group, lambda: pending.begin(snapshot.state))
        written = together(group, f"saving {snapshot.path}", lambda: _write_rank(pending, group.rank, snapshot, max_file_bytes))
        reports = gather(group, written)
        on_first_rank(group, lambda: pending.commit(_tensor_entries(reports), _file_sizes(reports), snapshot.info))


class _RankReport(NamedTuple):
    files: list[WrittenFile]
    tensors: dict[str, tuple[Shape, torch.dtype]]


def _write_rank(pending: PendingSave, rank: int, snapshot: Snapshot, max_file_bytes: int) -> _RankReport:
    stem = f"tensors.{pending.identifier}.{rank:05d}"
    return _RankReport(write_shards(pending.folder, stem, snapshot.pieces, max_file_bytes), dict(snapshot.tensors))


def _file_sizes(reports: Sequence[_RankReport]) -> dict[str, int]:
    return {file.name: file.size_bytes for report in reports for file in report.files}


def _tensor_entries(reports: Sequence[_RankReport]) -> dict[str, TensorEntry]:
    described: dict[str, tuple[Shape, torch.dtype]] = {}
    shards: dict[str, list[Shard]] = {}
    for report in reports:
        for name, (shape, dtype) in report.tensors.items():
            if described.setdefault(name, (shape, dtype)) != (shape, dtype):
                first = described[name]
                raise CheckpointError(
                    f"{name} has shape {first[0]} and {first[1]} on one rank, {shape} and {dtype} on another. "
                    "Its sharding is declared wrongly."
                )
        for file in report.files:
            for name, shard in file.shards:
                shards.setdefault(name, []).append(shard)
    return {name: TensorEntry(shape, dtype, tuple(shards.get(name, ()))) for name, (shape, dtype) in described.items()}


def _as_json(info: Mapping[str, Any]) -> dict[str, Any]:
    versions = {"megatron_lightning": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: version(name) for name in ("lightning", "numpy", "safetensors")}
    # Two passes: values that JSON lacks become text, and so do NaN and infinity, which other readers refuse.
    text = json.dumps({"versions": versions, **info}, default=str, skipkeys=True)
    result: dict[str, Any] = json.loads(text, parse_constant=str)
    return result
