"""Fill the tensors of all ranks from a checkpoint of any layout.

A rank reads the byte ranges that its own boxes need, straight into its tensors. Ranks that hold the same boxes (data-parallel
replicas) read a part of each and give it to one another: the storage is read once, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_lightning.checkpoint.agreement import ALONE, together
from megatron_lightning.checkpoint.shard_file import Piece
from megatron_lightning.checkpoint.sharded import PART_BYTES, TensorShards, parts_of
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup


class LoadReport(NamedTuple):
    """What a load that is not strict left out."""

    missing: tuple[str, ...]
    """Names that some rank asked for and the checkpoint lacks; their tensors are unchanged."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that no rank asked for."""


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
    replies = group.all_gather_object(request._replace(wanted=[]))
    missing = sorted({name for reply in replies for name in reply.missing})
    misfits = sorted({text for reply in replies for text in reply.misfits})
    asked = reduce(or_, (reply.asked for reply in replies))
    unexpected = [name for i, name in enumerate(stored) if name.startswith(prefix) and not asked >> i & 1]
    report = LoadReport(tuple(missing), tuple(unexpected))
    _refuse_misfits(misfits, report, strict, prefix)
    together(group, "loading the checkpoint", lambda: source.read(_own_reads(request.wanted)))
    for shards in request.wanted:  # in the same order on all replicas
        _exchange(shards)
    return report


class _Request(NamedTuple):
    wanted: list[TensorShards]
    missing: list[str]
    misfits: list[str]
    asked: int


def _request(tensors: Iterable[TensorShards], stored: Mapping[str, TensorInfo]) -> _Request:
    wanted = list(tensors)
    index = {name: i for i, name in enumerate(stored)}
    present = [shards for shards in wanted if shards.name in stored]
    return _Request(
        wanted=present,
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


def _own_reads(wanted: Sequence[TensorShards]) -> Iterator[Piece]:
    for shards in wanted:
        for offset, view in shards.pieces:
            if view.numel() and not _is_shared(shards, view):
                yield Piece(shards.name, offset, view)
            elif view.numel():
                parts = parts_of(shards.name, offset, view, shards.replicas.size)
                yield from (part for replica, part in parts if replica == shards.replicas.rank)


def _is_shared(shards: TensorShards, view: Tensor) -> bool:
    """Whether replicas each read a part; small boxes are read by all, which is faster than asking."""
    return shards.replicas.process_group is not None and view.nbytes > PART_BYTES


def _exchange(shards: TensorShards) -> None:
    """Give the other replicas the parts that this one has read; a collective over them."""
    group = shards.replicas
    for offset, view in shards.pieces:
        if not _is_shared(shards, view):
            continue
        for replica, part in parts_of(shards.name, offset, view, group.size):
            buffer = part.view.contiguous()
            dist.broadcast(buffer, src=group.ranks[replica], group=group.process_group)
            if buffer is not part.view:
                part.view.copy_(buffer)


def _refuse_misfits(misfits: Sequence[str], report: LoadReport, strict: bool, prefix: str) -> None:
    problems = [("do not fit", misfits)]
    if strict:
        problems += [
            ("are missing from the checkpoint", report.missing),
            ("are unexpected in the checkpoint", report.unexpected),
        ]
    texts = [f"{len(names)} tensors {what}:\n{_listed(names)}" for what, names in problems if names]
    if texts:
        hint = "" if misfits else " strict=False loads what there is."
        if prefix.startswith("optimizer_states."):  # no part of an optimizer may silently begin anew, or be lost
            hint = " To go on with other parameters, load the weights alone."
        raise CheckpointError("\n".join(texts) + f"\nLoad it into the model it was saved from.{hint}")


def _listed(names: Sequence[str]) -> str:
    more = [f"  and {len(names) - 20} more"] if len(names) > 20 else []
    return "\n".join([*(f"  {name}" for name in names[:20]), *more])
