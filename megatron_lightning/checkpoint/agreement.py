"""Decisions that all ranks take together, so that an error on one rank is an error on every rank and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup

T = TypeVar("T")

ALONE = AxisGroup("alone", (0,), 0, None)


def gather(group: AxisGroup, value: T) -> list[T]:
    """Return the value of every rank on the group's first rank, and nothing on the others."""
    if group.process_group is None:
        return [value]
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(value, values, dst=group.ranks[0], group=group.process_group)
    return values or []


def on_first_rank(group: AxisGroup, step: Callable[[], T]) -> T:
    """Run ``step`` on the group's first rank and return its result on every rank.

    Raises:
        CheckpointError: On every rank, if the step raised there.
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
    """Run ``step`` on every rank and return this rank's result.

    Args:
        group: The ranks that take part.
        doing: What they are doing, for the message.
        step: This rank's part; it may not communicate.

    Raises:
        CheckpointError: On every rank, if the step raised on any, naming each failed rank and its error.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(step())
    except Exception as error:
        failure = error
    errors = group.all_gather_object(_describe(failure) if failure else None)
    failed = [f"rank {rank}: {text}" for rank, text in zip(group.ranks, errors, strict=True) if text]
    if failed:
        more = f"; and {len(failed) - 8} more ranks" if len(failed) > 8 else ""
        raise CheckpointError(f"{doing} failed on {len(failed)} rank(s): {'; '.join(failed[:8])}{more}") from failure
    return result[0]


def _describe(error: Exception) -> str:
    """Return the text of an error; our own messages need no type."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
