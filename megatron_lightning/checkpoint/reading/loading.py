"""Fill the tensors of all ranks from a checkpoint of any layout.

A rank reads the byte ranges of the rank's shards, straight into the tensors. Ranks with the same
shards (data-parallel replicas) each read a part and broadcast the part to the other replicas: the
storage is read once, for any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch.distributed as dist

from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.checkpoint.replicas import MIN_SPLIT_BYTES, divide_shard
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.shards.spec import Shard
from megatron_lightning.parallel.shards.tensor_shards import TensorShards


class LoadReport(NamedTuple):
    """Names left out by a non-strict load."""

    missing: tuple[str, ...]
    """Requested by a rank and not in the checkpoint. The tensors of these names are unchanged."""
    unexpected: tuple[str, ...]
    """In the checkpoint and requested by no rank."""


def load_sharded(
    source: CheckpointSource,
    tensors: Iterable[TensorShards],
    *,
    prefix: str = "",
    strict: bool = True,
    group: AxisGroup = ALONE,
) -> LoadReport:
    """Fill existing tensors from a checkpoint. All ranks of ``group`` call this. Nothing is changed
    if a tensor does not fit.

    Args:
        source: The opened checkpoint (see ``open_checkpoint``).
        tensors: The shards of this rank, with any ``writes``. Floating dtypes are converted to the
            shards' dtype.
        prefix: Prefix of the expected tensors of the checkpoint, such as ``"state_dict."``.
        strict: Whether missing and unexpected names are errors.
        group: The loading ranks.
    """
    stored = source.tensors()
    request = together(group, "loading the checkpoint", lambda: _request(tensors, stored))
    # One bit for each tensor, because thousands of ranks exchange requests.
    replies = group.all_gather_object(request._replace(wanted=[]))
    missing_names = sorted({name for reply in replies for name in reply.missing})
    misfits = sorted({text for reply in replies for text in reply.misfits})
    asked_bits = reduce(or_, (reply.asked for reply in replies))
    unexpected = [
        name for i, name in enumerate(stored) if name.startswith(prefix) and not asked_bits >> i & 1
    ]
    report = LoadReport(tuple(missing_names), tuple(unexpected))
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
    requested = list(tensors)
    index = {name: i for i, name in enumerate(stored)}
    stored_shards = [shards for shards in requested if shards.name in stored]
    return _Request(
        wanted=stored_shards,
        missing=[shards.name for shards in requested if shards.name not in stored],
        misfits=[
            text for shards in stored_shards if (text := _misfit(shards, stored[shards.name]))
        ],
        asked=sum(1 << i for i in {index[shards.name] for shards in stored_shards}),
    )


def _misfit(shards: TensorShards, stored: TensorInfo) -> str | None:
    if shards.global_shape != stored.shape:
        return (
            f"{shards.name}: {stored.shape} in the checkpoint, {shards.global_shape} in the model"
        )
    if shards.dtype != stored.dtype and not (
        shards.dtype.is_floating_point and stored.dtype.is_floating_point
    ):
        return f"{shards.name}: {stored.dtype} in the checkpoint, {shards.dtype} in the model"
    return None


def _own_reads(wanted: Sequence[TensorShards]) -> Iterator[tuple[str, Shard]]:
    for tensor in wanted:
        for shard in tensor.shards:
            if shard.data.numel() and not _is_divided(tensor, shard):
                yield tensor.name, shard
            elif shard.data.numel():
                parts = divide_shard(tensor.name, shard, tensor.replicas.size)
                yield from (
                    (tensor.name, part)
                    for replica, part in parts
                    if replica == tensor.replicas.rank
                )


def _is_divided(tensor: TensorShards, shard: Shard) -> bool:
    """Whether replicas each read a part. All replicas read small shards, because communicating is
    slower.
    """
    return tensor.replicas.process_group is not None and shard.data.nbytes > MIN_SPLIT_BYTES


def _exchange(tensor: TensorShards) -> None:
    """Broadcast the parts read by each replica. A collective over the replicas."""
    group = tensor.replicas
    for shard in tensor.shards:
        if not _is_divided(tensor, shard):
            continue
        for replica, (_, data) in divide_shard(tensor.name, shard, group.size):
            buffer = data.contiguous()
            dist.broadcast(buffer, src=group.ranks[replica], group=group.process_group)
            if buffer is not data:
                data.copy_(buffer)


def _refuse_misfits(misfits: Sequence[str], report: LoadReport, strict: bool, prefix: str) -> None:
    problems = [("do not fit", misfits)]
    if strict:
        problems += [
            ("are missing from the checkpoint", report.missing),
            ("are unexpected in the checkpoint", report.unexpected),
        ]
    texts = [f"{len(names)} tensors {what}:\n{_listed(names)}" for what, names in problems if names]
    if texts:
        hint = "" if misfits else " strict=False loads the others."
        # An error: an optimizer's state is never reset silently.
        if prefix.startswith("optimizer_states."):
            hint = " To resume with other parameters, load the weights alone."
        raise CheckpointError(
            "\n".join(texts) + f"\nLoad it into the model it was saved from.{hint}"
        )


def _listed(names: Sequence[str]) -> str:
    return "\n".join(f"  {name}" for name in names[:20]) + (
        f"\n  and {len(names) - 20} more" if len(names) > 20 else ""
    )
