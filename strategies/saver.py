"""When checkpoints are written and when old ones go: at once or in the background, and never the last good one.

Callbacks delete an old checkpoint as soon as the Trainer's save returns. While the new one is still being written, or if it
failed, the old one is all there is; so deletions wait for a commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.checkpoint import TensorShards, remove_checkpoint
from megatron_lightning.checkpoint.background import BackgroundJob, HostBuffer
from megatron_lightning.checkpoint.saving import Snapshot, take_snapshot, write_snapshot
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup, ParallelContext


@dataclass(frozen=True)
class SaveReport:
    """What a save cost this rank."""

    path: str
    """The checkpoint."""
    stall_s: float
    """Seconds that training waited: for the save before it, for the copy, and without ``async_save`` for the writing."""
    written_s: float | None = None
    """Seconds from the call to the commit; None: it is not committed."""
    num_bytes: int = 0
    """Bytes of tensors that this rank wrote."""


class Saver:
    """Writes the checkpoints of one strategy.

    Args:
        options: The strategy's checkpoint options.
        timeout: Limit of a collective of the background's own process group.
    """

    def __init__(self, options: CheckpointOptions, timeout: timedelta) -> None:
        self._options, self._timeout = options, timeout
        self._buffer = HostBuffer()
        self._job: BackgroundJob | None = None
        self._group: AxisGroup | None = None
        self._lock = threading.Lock()  # of what the main thread and the job share on the first rank:
        self._writing = self._failed = False
        self._doomed: list[str] = []
        self.last: SaveReport | None = None
        """The save before; its ``written_s`` is known when the next one begins, or training ends."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Saver, (self._options, self._timeout))  # in another process nothing is being saved

    def save(
        self,
        path: str,
        tensors: Iterable[TensorShards],
        state: Mapping[str, Any],
        info: Mapping[str, Any],
        context: ParallelContext,
        *,
        background: bool,
    ) -> None:
        """Write a checkpoint; all ranks call this.

        Raises:
            CheckpointError: On every rank, if one failed in this save, or in the one before that ran in the background, and
                ``on_save_error`` is "raise". What stood under ``path`` is intact.
        """
        began = time.monotonic()
        self.finish()
        with self._lock:
            self._writing = True
            self._doomed = [doomed for doomed in self._doomed if doomed != path]
        try:
            snapshot = take_snapshot(path, tensors, state, info=info, group=context.axis("world"))
            if background:
                group, snapshot = self._own_group(context), self._buffer.copy_of(snapshot)
                self.last = SaveReport(path, time.monotonic() - began, num_bytes=snapshot.num_bytes)
                self._job = BackgroundJob(lambda: self._write(snapshot, group, began))
                return
            self.last = SaveReport(path, 0.0, num_bytes=snapshot.num_bytes)
            self._write(snapshot, context.axis("world"), began)
            self.last = SaveReport(path, time.monotonic() - began, self.last.written_s, snapshot.num_bytes)
        except CheckpointError as error:
            self._settle(committed=False)
            self._report(error)

    def _write(self, snapshot: Snapshot, group: AxisGroup, began: float) -> None:
        """Write and commit; afterwards delete what had to wait for it."""
        committed = False
        try:
            write_snapshot(snapshot, group)
            committed = True
        finally:
            self._settle(committed=committed)
        if self.last is not None:
            self.last = SaveReport(self.last.path, self.last.stall_s, time.monotonic() - began, self.last.num_bytes)

    def _settle(self, *, committed: bool) -> None:
        with self._lock:
            self._writing, self._failed = False, not committed
            doomed, self._doomed = (self._doomed, []) if committed else ([], self._doomed)
        for path in doomed:
            remove_checkpoint(path)

    def _own_group(self, context: ParallelContext) -> AxisGroup:
        """Return all ranks with a communicator that only background saves use; made by the first of them."""
        world = context.axis("world")
        if self._group is None or self._group.ranks != world.ranks:
            process_group = None
            if world.process_group is not None:
                process_group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="checkpoint")
            self._group = AxisGroup("checkpoint", world.ranks, world.rank, process_group)
        return self._group

    def finish(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: If it failed and ``on_save_error`` is "raise".
        """
        job, self._job = self._job, None
        error = job.wait() if job is not None else None
        if isinstance(error, CheckpointError):
            self._report(error)
        elif error is not None:
            raise CheckpointError(f"the save in the background failed: {type(error).__name__}: {error}") from error

    def finish_quietly(self) -> None:
        """Wait for the save in the background while an exception is on its way; what it raises is a warning."""
        try:
            self.finish()
        except CheckpointError as error:
            rank_zero_warn(str(error))

    def _report(self, error: CheckpointError) -> None:
        if self._options.on_save_error == "raise":
            raise error
        rank_zero_warn(f"A checkpoint was not saved, and training goes on without it: {error}")

    def remove(self, path: str) -> None:
        """Delete a checkpoint as soon as a newer one is committed; called on the first rank."""
        with self._lock:
            if self._writing or self._failed:
                self._doomed.append(path)
                return
        remove_checkpoint(path)
