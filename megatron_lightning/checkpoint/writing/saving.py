"""Write the tensors of all ranks as a single checkpoint: take a snapshot while training waits, then
write the snapshot.
"""

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
from megatron_lightning.checkpoint.agreement import gather, on_first_rank, together
from megatron_lightning.checkpoint.format.files import new_identifier
from megatron_lightning.checkpoint.format.manifest import StoredShard, TensorInfo, dtype_name
from megatron_lightning.checkpoint.format.plain_state import dump_state
from megatron_lightning.checkpoint.format.shard_file import WrittenFile, write_shards
from megatron_lightning.checkpoint.replicas import written_shards
from megatron_lightning.checkpoint.writing.commit import PendingSave, pending_save
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import shard_stem
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.shards.spec import Shard
from megatron_lightning.parallel.shards.tensor_shards import TensorShards

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
    """Write a checkpoint directory. All ranks of ``group`` call this. All calls return after the
    commit.

    An existing checkpoint at ``path`` stays readable until the commit, and stays if any rank fails.

    Args:
        path: The directory, on a file system shared by all ranks.
        tensors: The shards of this rank, possibly from a generator. Errors of the generator are
            reported like errors of writing.
        state: Everything else, from the first rank. For the allowed values see
            ``format.plain_state``.
        info: Layout, hyper-parameters, consumed samples …, for display, stored as JSON.
        group: The saving ranks.
        max_file_bytes: Largest size of a file of a rank.

    Raises:
        CheckpointError: On every rank, if any rank failed, the state has no plain form, or the
            tensors written by all ranks do not cover each global tensor exactly once.
    """
    write_snapshot(
        take_snapshot(path, tensors, state, info=info, group=group), group, max_file_bytes
    )


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint to write on this rank."""

    path: str
    """The checkpoint's name."""
    identifier: str
    """Id of this save, the same on all ranks."""
    state: bytes
    """Content of the state file on the first rank."""
    shards: tuple[tuple[str, Shard], ...]
    """(tensor name, shard) to write on this rank, as views of the live tensors or as copies."""
    tensors: Mapping[str, TensorInfo]
    """Every tensor with shards on this rank."""
    info: Mapping[str, Any]
    """See ``Manifest``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards."""
        return sum(shard.data.nbytes for _, shard in self.shards)


def take_snapshot(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorShards],
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: AxisGroup = ALONE,
) -> Snapshot:
    """Collect the content of a save. All ranks of ``group`` call this. For arguments and errors see
    :func:`save_sharded`.
    """

    def collect() -> Snapshot:
        writing = [tensor for tensor in tensors if tensor.writes]
        described = {
            tensor.name: TensorInfo(tensor.global_shape, tensor.dtype) for tensor in writing
        }
        for tensor in described.values():
            dtype_name(tensor.dtype)
        shards = tuple(shard for tensor in writing for shard in written_shards(tensor))
        data = dump_state(state) if group.rank == 0 else b""
        return Snapshot(str(path), "", data, shards, described, _as_json(info or {}))

    snapshot = together(group, f"saving {path}", collect)
    return replace(snapshot, identifier=on_first_rank(group, new_identifier))


def write_snapshot(
    snapshot: Snapshot, group: AxisGroup = ALONE, max_file_bytes: int = _MAX_FILE_BYTES
) -> None:
    """Write and commit a snapshot. All ranks of ``group`` call this. For errors see
    :func:`save_sharded`.
    """
    pending = pending_save(snapshot.path, snapshot.identifier)
    with pending.discarded_on_error():
        on_first_rank(group, lambda: pending.begin(snapshot.state))
        num_written = together(
            group,
            f"saving {snapshot.path}",
            lambda: _write_rank(pending, group.rank, snapshot, max_file_bytes),
        )
        reports = gather(group, num_written)
        sizes = {file.name: file.size_bytes for report in reports for file in report.files}
        on_first_rank(group, lambda: pending.commit(_merged_tensors(reports), sizes, snapshot.info))


class _RankReport(NamedTuple):
    files: list[WrittenFile]
    tensors: dict[str, TensorInfo]


def _write_rank(
    pending: PendingSave, rank: int, snapshot: Snapshot, max_file_bytes: int
) -> _RankReport:
    stem = shard_stem(pending.identifier, rank)
    return _RankReport(
        write_shards(pending.folder, stem, snapshot.shards, max_file_bytes), dict(snapshot.tensors)
    )


def _merged_tensors(reports: Sequence[_RankReport]) -> dict[str, TensorInfo]:
    described: dict[str, TensorInfo] = {}
    shards: dict[str, list[StoredShard]] = {}
    for report in reports:
        for name, info in report.tensors.items():
            first = described.setdefault(name, info)
            if first != info:
                raise CheckpointError(
                    f"{name} has shape {first.shape} and {first.dtype} on one rank, {info.shape} "
                    f"and {info.dtype} on another. Its sharding is declared wrongly."
                )
        for file in report.files:
            for name, shard in file.shards:
                shards.setdefault(name, []).append(shard)
    return {
        name: replace(info, shards=tuple(shards.get(name, ()))) for name, info in described.items()
    }


def _as_json(info: Mapping[str, Any]) -> dict[str, Any]:
    versions = {
        "megatron_lightning": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    versions |= {name: version(name) for name in ("lightning", "numpy", "safetensors")}
    # Values without a JSON form become text. So do NaN and infinity, because other readers refuse
    # both.
    text = json.dumps({"versions": versions, **info}, default=str, skipkeys=True)
    result: dict[str, Any] = json.loads(text, parse_constant=str)
    return result
