"""Compare long lists of numbers, and bytes, in a state to be saved. Lists and bytes may be a rank's
tensor in another form (``.tolist()``, a pickle), and rank 0's values are saved for all ranks.

A history of times differs between ranks, too. A difference is therefore a warning and no error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.assembly.replicas import diverged
from megatron_lightning.parallel.grid.context import ParallelContext

_FEWEST = 16
"""Smallest number of list elements, or bytes, that may represent a tensor."""


def compare_plain_values(rest: Mapping[str, Any], context: ParallelContext) -> None:
    """Warn of long lists of numbers and of bytes that differ between the ranks of a replica. A
    collective.
    """
    world = context.axis("world")
    if context.layout.replica_size == 1 or world.process_group is None:
        return
    marks = dict(_marks(rest, ""))
    # One number a rank says whether anything differs. Names follow only then.
    total = torch.tensor([sum(marks.values())], dtype=torch.int64, device=context.device)
    differs = torch.zeros(1, dtype=torch.int32, device=context.device)
    for axis in ("tp-pp", "cp"):
        differs |= bool(diverged(total, context.axis(axis)))
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=world.process_group)
    if not differs.item():
        return
    ranks = world.all_gather_object((context.dp.rank, marks))
    own_values = [values for replica, values in ranks if replica == ranks[0][0]]
    names = sorted(
        {n for values in own_values for n in values if len({m.get(n) for m in own_values}) > 1}
    )
    if names:
        rank_zero_warn(
            f"{', '.join(names[:5])} of the state to be saved differ between ranks of one model "
            "replica, and the checkpoint holds those of rank 0. Numbers or bytes that stand for "
            "weights would be one rank's: save tensors in a dict by the names of their parameters, "
            "which come from all ranks. Times and other values of a rank are no fault."
        )


def _marks(value: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, bytes | bytearray) and len(value) >= _FEWEST:
        yield path, zlib.crc32(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _marks(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        numbers = _numbers(value)
        if numbers is not None and len(numbers) >= _FEWEST:
            rounded = [f"{number:.3g}" for number in numbers]  # copies differ in the last bits
            yield path, zlib.crc32(repr(rounded).encode())
        elif numbers is None:
            for index, inner in enumerate(value):
                yield from _marks(inner, f"{path}.{index}")


def _numbers(value: Any) -> list[float] | None:
    """Return the numbers of nested lists. None: the lists hold other values."""
    numbers: list[float] = []
    for inner in value:
        if isinstance(inner, list | tuple):
            within = _numbers(inner)
            if within is None:
                return None
            numbers += within
        elif isinstance(inner, int | float):
            numbers.append(inner)
        else:
            return None
    return numbers
