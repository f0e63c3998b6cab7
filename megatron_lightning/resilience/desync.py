"""Name the calls of ranks that wait for each other forever: a collective under ``if
trainer.is_global_zero``, or a training loop that one rank leaves.

A rank without a new call for some seconds publishes the rank's record through the job's store.
Rank 0 compares the records. Nothing is published while calls follow each other.
"""

from __future__ import annotations

import json
import linecache
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice, pairwise
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.origin import is_library_module
from megatron_lightning.resilience.collective_log import (
    Course,
    Mark,
    Record,
    apart,
    crosses,
    passed,
)
from megatron_lightning.resilience.failure import Failure

_STALL_S = 2.5
_LOOK_S = 0.5
_STORE_SECONDS_PER_RANK = 2e-3
_NUM_LOOKS = 5  # that find a rank in the same collective after another rank has passed
_NUM_FRAMES = 80
_TOGETHER = frozenset((
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object",
    "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter", "all_to_all_single",
    "all_to_all", "barrier", "broadcast", "broadcast_object_list",
))  # fmt: skip
"""Collectives that no rank leaves long before another rank of the group."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_OUR_COLLECTIVES = ("parallel/collectives.py", "parallel/sequence_exchange.py")
_CALLS_HOOKS = "trainer/call.py"
_INNERMOST = 16  # frames searched for a collective
BATCH = "training batch"
END_OF_TRAINING = "the end of training"
VALIDATION = "a validation"
_LOOPS: Mapping[str, str] = {
    "pytorch/loops/training_epoch_loop.py": "the next training batch",  # agrees on signals before
    "pytorch/loops/fit_loop.py": "the end of an epoch",
    "pytorch/loops/evaluation_loop.py": VALIDATION,
}
"""File of Lightning's loop -> the call of a rank that waits in the loop, outside of hooks."""
_FOREVER = "ranks wait for each other forever"
_CALL_ON_ALL = (
    "Call it on all ranks, not under `if trainer.is_global_zero`, and use the returned values on "
    "one rank."
)
_DECIDE_ALIKE = (
    "A rank leaves the training loop alone if trainer.should_stop is set, or on_train_batch_start "
    "returns -1, by a value of that rank. Decide alike on all ranks: trainer.should_stop = "
    "trainer.strategy.reduce_boolean_decision(stop, all=False)."
)


class LoneRanks:
    """Publishes this rank's record while the rank waits, and compares on rank 0.

    Args:
        course: The record of this rank.
        store: Key-value store of the run.
        rank: This process's global rank.
        world_size: Ranks of the job.
    """

    def __init__(self, course: Course, store: compat.Store, rank: int, world_size: int) -> None:
        self._course = course
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._every_s = max(_LOOK_S, world_size * _STORE_SECONDS_PER_RANK)
        self._looked_at = 0.0
        self._last: Record | None = None  # as published
        self._passed: dict[tuple[int, str], int] = {}  # waiting rank -> looks when it was passed

    def look(self) -> Failure | None:
        """Publish and compare if this rank has made no call for long. Called from a thread, often.

        Raises:
            RuntimeError: If the store has ended.
        """
        now, course = time.monotonic(), self._course
        if course.has_ended or now - course.changed_at < _STALL_S:
            if self._last is not None:
                self._last = None
                self._passed.clear()
                # The store's get would wait for a deleted key.
                self._store.set(f"record/{self._rank}", "")
            return None
        if now - self._looked_at < self._every_s:
            return None
        self._looked_at = now
        self._publish()
        return self._compare() if self._rank == 0 else None

    def _publish(self) -> None:
        num_calls, marks = self._course.num_calls, self._course.marks()
        frames = list(islice(_main_frames(), _NUM_FRAMES))
        function, waits_in, waits_for = _collective(frames)
        where = _where(frames)
        if waits_in and not where:
            waits_in = _loop(frames) or waits_in
        record = Record(self._rank, marks, num_calls, waits_in, waits_for, function, where)
        last = self._last
        if last is not None and replace(last, num_looks=1) == record:
            record = replace(record, num_looks=last.num_looks + 1)
        self._last = record
        self._store.set(f"record/{self._rank}", json.dumps(asdict(record)))

    def _compare(self) -> Failure | None:
        """Compare the published records with rank 0's, and with the next rank's."""
        records = list(self._read())
        by_rank = {record.rank: record for record in records}
        first = records[0]
        for previous, record in pairwise(records):
            for one in {first.rank: first, previous.rank: previous}.values():
                marks = apart(one, record)
                if marks is not None:
                    return _failure(_explain_calls(one, record, *marks))
                for waiting, other_record in ((one, record), (record, one)):
                    if (mark := passed(waiting, other_record, by_rank)) and self._stays(waiting):
                        return _failure(_explain_collective(waiting, other_record, mark))
                if crosses(one, record, by_rank) and self._stays(one) and self._stays(record):
                    return _failure(_explain_crossed(one, record))
        return None

    def _stays(self, record: Record) -> bool:
        """Whether a rank was found in the same collective again and again after another rank had
        passed.
        """
        key = record.rank, record.waits_in + record.where
        begun = self._passed.setdefault(key, record.num_looks)
        if record.num_looks < begun:
            self._passed[key] = begun = record.num_looks
        return record.num_looks - begun >= _NUM_LOOKS

    def _read(self) -> Iterator[Record]:
        if self._last is not None:
            yield self._last
        for rank in range(1, self._world_size):
            key = f"record/{rank}"
            if self._store.check([key]) and (text := self._store.get(key)):
                yield _record(json.loads(text))


def _record(values: dict[str, Any]) -> Record:
    marks = tuple(Mark(**mark | {"ranks": tuple(mark["ranks"])}) for mark in values["marks"])
    return Record(**values | {"marks": marks, "waits_for": tuple(values["waits_for"])})


def _failure(text: str) -> Failure:
    host = socket.gethostname()
    return Failure(-1, host, text, explained=True, printed=True, gone=True)


def _explain_calls(one: Record, other: Record, own: Mark, its: Mark) -> str:
    """Return the message for two ranks with different calls in the same place."""
    sides = [
        f"rank {record.rank} has come to {mark.what}{record.where if record.is_at(mark) else ''}"
        for record, mark in ((one, own), (other, its))
    ]
    return _text(_before(one, own), sides, (own.what, its.what))


def _explain_collective(waiting: Record, other: Record, mark: Mark) -> str:
    """Return the message for a collective that another rank has passed without a call."""
    sides = [
        _waits(waiting),
        f"rank {other.rank} has come to {mark.what}{other.where if other.is_at(mark) else ''}",
    ]
    return _text(_before(other, mark), sides, (waiting.waits_in, mark.what))


def _explain_crossed(one: Record, other: Record) -> str:
    """Return the message for two ranks in different collectives."""
    sides = [_waits(record) for record in (one, other)]
    return f"{_FOREVER}: {' and '.join(sides)}. {_CALL_ON_ALL}"


def _waits(record: Record) -> str:
    verb = "has come to" if record.waits_in in _LOOPS.values() else "waits in"
    return f"rank {record.rank} {verb} {record.waits_in}{record.where}"


def _text(before: str, sides: Sequence[str], calls: Sequence[str]) -> str:
    parts = (BATCH, END_OF_TRAINING, *_LOOPS.values())
    of_loop = [any(part in call for part in parts) for call in calls]
    advice = _DECIDE_ALIKE if all(of_loop) else _CALL_ON_ALL
    return f"{_FOREVER}: {before}{' and '.join(sides)}. {advice}"


def _before(record: Record, mark: Mark) -> str:
    """Return the last training batch before a call."""
    marks_before = record.marks[: record.marks.index(mark)]
    last = next((m.what for m in reversed(marks_before) if m.what.startswith(f"{BATCH} ")), "")
    return f"after {last}, " if last else ""


def _main_frames() -> Iterator[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frames: Sequence[FrameType]) -> tuple[str, str, tuple[int, ...]]:
    """Return the function of the collective that the innermost frames are in, the collective as a
    user knows it, and the ranks of the group.
    """
    is_forward = any(frame.f_code.co_name == "_call_impl" for frame in frames)
    for frame in reversed(frames[:_INNERMOST]):  # broadcast in broadcast_object_list, say
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        group = frame.f_locals.get("group")
        if path.endswith(_OUR_COLLECTIVES) and isinstance(group, AxisGroup):
            words = "the forward of a layer" if is_forward else f"{name} of a layer"
            return name, words, group.ranks
        if name in _TOGETHER and path.endswith(_COLLECTIVES):
            group = group or dist.group.WORLD
            if isinstance(group, dist.ProcessGroup):
                words = f"{name}, in a forward" if is_forward else f"torch.distributed.{name}"
                return name, words, tuple(dist.get_process_group_ranks(group))
    return "", "", ()


def _loop(frames: Sequence[FrameType]) -> str:
    """Return what a rank has come to in the innermost of Lightning's loops. Empty: no loop."""
    loops = (
        what
        for frame in frames
        for path, what in _LOOPS.items()
        if frame.f_code.co_filename.endswith(path)
    )
    return next(loops, "")


def _where(frames: Sequence[FrameType]) -> str:
    """Return the line of the user's hook, to follow a call. Empty: no code of the user runs."""
    place = None
    for frame in frames:
        if frame.f_code.co_filename.endswith(_CALLS_HOOKS):
            break
        name = str(frame.f_globals.get("__name__", ""))
        is_library = is_library_module(name) or "site-packages" in frame.f_code.co_filename
        if not is_library and name.partition(".")[0] not in sys.stdlib_module_names:
            place = frame
    if place is None or place.f_code.co_name == "<module>":
        return ""
    path, line = place.f_code.co_filename, place.f_lineno
    text = linecache.getline(path, line).strip()
    return f", called in {place.f_code.co_name} ({path}:{line}: {text})"
