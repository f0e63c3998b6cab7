"""Collective steps with errors shared by all ranks: no rank waits forever for a failed rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import AxisGroup

T = TypeVar("T")


def gather(group: AxisGroup, value: T) -> list[T]:
    """Return the value of every rank on the group's first rank, and an empty list on all other
    ranks.
    """
    if group.process_group is None:
        return [value]
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(value, values, dst=group.ranks[0], group=group.process_group)
    return values or []


def on_first_rank(group: AxisGroup, step: Callable[[], T]) -> T:
    """Run ``step`` on the group's first rank and return its result on every rank.

    Raises:
        CheckpointError: On every rank, if the step raised on the first rank.
    """
    outcome: list[Any] = [None, None, None]
    if group.rank == 0:
        try:
            outcome[0] = step()
        except Exception as error:
            outcome[1:] = _describe(error), error
    outcome[:2] = group.broadcast_object(outcome[:2])  # the error itself need not be picklable
    if outcome[1] is not None:
        raise CheckpointError(outcome[1]) from outcome[2]
    result: T = outcome[0]
    return result


def together(group: AxisGroup, doing: str, step: Callable[[], T]) -> T:
    """Run ``step`` on every rank and return this rank's result. ``step`` may not communicate.

    Raises:
        CheckpointError: On every rank, if the step raised on any rank. The message names ``doing``,
            the failed ranks and the reasons.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:
        failure = error
    errors = group.all_gather_object(_describe(failure) if failure else None)
    failed = [
        f"rank {rank}: {text}" for rank, text in zip(group.ranks, errors, strict=True) if text
    ]
    if failed:
        more = f"; and {len(failed) - 8} more ranks" if len(failed) > 8 else ""
        raise CheckpointError(
            f"{doing} failed on {len(failed)} rank(s): {'; '.join(failed[:8])}{more}"
        ) from failure
    own_result: T = result
    return own_result


def _describe(error: Exception) -> str:
    """Return the text of an error, with the type unless the error is a ``CheckpointError``."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
