"""Save tensors that are spread over ranks, and load them under any other layout.

Every rank states what it holds as :class:`TensorShards`: the global name and shape of a tensor, and boxes of it as views of
its own memory. How the boxes came about (tensor parallel, a flat range of an optimizer shard, a whole tensor) does not matter,
neither for saving nor for loading, which is why any layout reads any other.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning import __version__
from megatron_lightning.checkpoint.agreement import ALONE, all_gather, gather, on_first_rank, together
from megatron_lightning.checkpoint.commit import PendingSave, new_identifier, pending_save
from megatron_lightning.checkpoint.manifest import Shape, Shard, TensorEntry, dtype_name
from megatron_lightning.checkpoint.shard_file import Piece, WrittenFile, write_shards
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo
from megatron_lightning.checkpoint.state import dump_state
from megatron_lightning.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_lightning.parallel.context import AxisGroup, ParallelContext
    from megatron_lightning.parallel.sharding import ShardSpec

_MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class TensorShards:
    """What this rank holds of one tensor.

    Raises:
        CheckpointError: If a piece is not inside the global shape or has another dtype.
    """

    name: str
    """Global name, the same under every layout."""
    global_shape: Shape
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Dtype of the pieces."""
    pieces: Sequence[tuple[Shape, Tensor]]
    """(first index in the global tensor, view of this rank's memory): the source of a save, the destination of a load."""
    writes: bool = True
    """Whether a save writes these pieces; exactly one rank of those that hold the same piece does."""

    def __post_init__(self) -> None:
        for offset, view in self.pieces:
            fits = len(offset) == view.dim() == len(self.global_shape) and all(
                o >= 0 and o + n <= full for o, n, full in zip(offset, view.shape, self.global_shape, strict=True)
            )
            if not fits or view.dtype != self.dtype:
                raise CheckpointError(
                    f"{self.name}: a piece of shape {tuple(view.shape)} and {view.dtype} at {offset} does not fit into a "
                    f"tensor of shape {self.global_shape} and {self.dtype}. Its sharding is declared wrongly."
                )

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, writes: bool = True) -> TensorShards:
        """Return the shards of a tensor that this rank holds whole."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, [((0,) * len(shape), tensor.detach())], writes)

    @classmethod
    def local(cls, name: str, spec: ShardSpec, tensor: Tensor, *, writes: bool = True) -> TensorShards:
        """Return the shards of a local tensor of the spec's local shape (a parameter, a moment)."""
        return cls(name, spec.global_shape, tensor.dtype, spec.pieces(tensor.detach()), writes)

    @classmethod
    def flat(cls, name: str, spec: ShardSpec, flat: Tensor, start: int, *, writes: bool = True) -> TensorShards:
        """Return the shards of elements [start, start + len) of the flattened local tensor (an optimizer shard)."""
        return cls(name, spec.global_shape, flat.dtype, spec.flat_pieces(flat.detach(), start), writes)


class LoadReport(NamedTuple):
    """What a load that is not strict left out."""

    missing: tuple[str, ...]
    """Names that some rank asked for and the checkpoint lacks; their tensors are unchanged."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that no rank asked for."""


def is_writer(
    spec: ShardSpec, context: ParallelContext, *, sharded_over: tuple[str, ...] = (), replicated_over: tuple[str, ...] = ()
) -> bool:
    """Return whether this rank writes its part of a tensor: it stands first on every axis over which the part is replicated.

    Args:
        spec: The parameter's spec; a tied copy is never written.
        context: The groups of this rank.
        sharded_over: Further axes over which the tensor is divided (``("dp", "cp")`` for a sharded optimizer).
        replicated_over: Further axes over which it is replicated (``("pp",)`` for what stands outside the pipeline).
    """
    divided = {*spec.sharded_over, *sharded_over}
    replicated = [axis for axis in ("tp", "cp", "ep", "dp", *replicated_over) if axis not in divided]
    return spec.tied_to is None and all(context.grid.coordinate(context.rank, axis, spec.grid) == 0 for axis in replicated)


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
    pending = pending_save(path, on_first_rank(group, new_identifier))
    with pending.discarded_on_error():
        on_first_rank(group, lambda: pending.begin(dump_state(state)))
        written = together(group, f"saving {path}", lambda: _write_rank(pending, group.rank, tensors, max_file_bytes))
        reports = gather(group, written)
        on_first_rank(group, lambda: pending.commit(_tensor_entries(reports), _file_sizes(reports), _as_json(info or {})))


class _RankReport(NamedTuple):
    files: list[WrittenFile]
    tensors: dict[str, tuple[Shape, torch.dtype]]


def _write_rank(pending: PendingSave, rank: int, tensors: Iterable[TensorShards], max_file_bytes: int) -> _RankReport:
    written = [shards for shards in tensors if shards.writes]
    for shards in written:
        dtype_name(shards.dtype)
    pieces = [Piece(shards.name, offset, view) for shards in written for offset, view in shards.pieces]
    files = write_shards(pending.folder, f"tensors.{pending.identifier}.{rank:05d}", pieces, max_file_bytes)
    return _RankReport(files, {shards.name: (shards.global_shape, shards.dtype) for shards in written})


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
    versions = {"megatron_lightning": __version__, "torch": torch.__version__, "python": platform.python_version()}
    # Two passes: values that JSON lacks become text, and so do NaN and infinity, which other readers refuse.
    text = json.dumps({"versions": versions, **info}, default=str, skipkeys=True)
    result: dict[str, Any] = json.loads(text, parse_constant=str)
    return result


def load_sharded(
    source: CheckpointSource,
    tensors: Iterable[TensorShards],
    *,
    prefix: str = "",
    strict: bool = True,
    group: AxisGroup = ALONE,
) -> LoadReport:
    """Fill existing tensors from a checkpoint; all ranks of ``group`` call this. Nothing is changed if a name does not fit.

    Args:
        source: The opened checkpoint (see ``open_checkpoint``).
        tensors: What this rank holds; ``writes`` does not matter. Floating dtypes are converted to the pieces' dtype.
        prefix: Only the checkpoint's tensors whose names begin with this are expected (``"state_dict."``).
        strict: Whether missing and unexpected names are errors.
        group: The ranks that load together.

    Raises:
        CheckpointError: On every rank: for missing or unexpected names if ``strict``, for other shapes always, for damage.
    """
    stored = source.tensors()
    request = together(group, "loading the checkpoint", lambda: _request(tensors, stored))
    # One bit a tensor: thousands of ranks exchange what they ask for.
    replies = all_gather(group, request._replace(pieces=[]))
    missing = sorted({name for reply in replies for name in reply.missing})
    misfits = sorted({text for reply in replies for text in reply.misfits})
    asked = reduce(or_, (reply.asked for reply in replies))
    unexpected = [name for i, name in enumerate(stored) if name.startswith(prefix) and not asked >> i & 1]
    report = LoadReport(tuple(missing), tuple(unexpected))
    _refuse_misfits(misfits, report, strict)
    together(group, "loading the checkpoint", lambda: source.read(request.pieces))
    return report


class _Request(NamedTuple):
    pieces: list[Piece]
    missing: list[str]
    misfits: list[str]
    asked: int


def _request(tensors: Iterable[TensorShards], stored: Mapping[str, TensorInfo]) -> _Request:
    wanted = list(tensors)
    index = {name: i for i, name in enumerate(stored)}
    present = [shards for shards in wanted if shards.name in stored]
    return _Request(
        pieces=[Piece(shards.name, offset, view) for shards in present for offset, view in shards.pieces if view.numel()],
        missing=[shards.name for shards in wanted if shards.name not in stored],
        misfits=[text for shards in present if (text := _misfit(shards, stored[shards.name]))],
        asked=sum(1 << i for i in {index[shards.name] for shards in present}),
    )


def _misfit(shards: TensorShards, stored: TensorInfo) -> str | None:
    if shards.global_shape != stored.shape:
        return f"{shards.name}: {stored.shape} in the checkpoint, {shards.global_shape} in the model"
    if shards.dtype != stored.dtype and not (shards.dtype.is_floating_point and stored.dtype.is_floating_point):
        return f"{shards.name}: {stored.dtype} in the checkpoint, {shards.dtype} in the model"
    return None


def _refuse_misfits(misfits: Sequence[str], report: LoadReport, strict: bool) -> None:
    problems = [("do not fit", misfits)]
    if strict:
        problems += [
            ("are missing from the checkpoint", report.missing),
            ("are unexpected in the checkpoint", report.unexpected),
        ]
    texts = [f"{len(names)} tensors {what}:\n{_listed(names)}" for what, names in problems if names]
    if texts:
        hint = "" if misfits else " strict=False loads what there is."
        raise CheckpointError("\n".join(texts) + f"\nLoad it into the model it was saved from.{hint}")


def _listed(names: Sequence[str]) -> str:
    more = [f"  and {len(names) - 20} more"] if len(names) > 20 else []
    return "\n".join([*(f"  {name}" for name in names[:20]), *more])
