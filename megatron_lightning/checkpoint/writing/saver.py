"""Write checkpoints, at once or in the background, and delete old ones, but never the last good
one.

Callbacks delete an old checkpoint as soon as the Trainer's save returns. During the write of the
new checkpoint, or after a failed save, the old checkpoint may be the only good checkpoint. So
deletions wait for a commit.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_lightning.checkpoint import remove_checkpoint
from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.writing.background import BackgroundJob, HostBuffer
from megatron_lightning.checkpoint.writing.saving import Snapshot
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext


@dataclass(frozen=True)
class SaveReport:
    """Cost of a save on this rank."""

    path: str
    """The checkpoint."""
    stall_s: float
    """Seconds of waiting training: for the previous save, the copy, and without ``async_save`` the
    writing."""
    written_s: float | None = None
    """Seconds from the call to the commit. None: not committed."""
    num_bytes: int = 0
    """Bytes of tensors written by this rank."""


@dataclass(frozen=True)
class Save:
    """Plan of a save."""

    path: str
    """Name of the save."""
    take: Callable[[AxisGroup], Snapshot]
    """Collects this rank's shards while training waits. All ranks call this."""
    write: Callable[[Snapshot, AxisGroup], None]
    """Writes and commits the snapshot over a group. All ranks call this."""
    replaces: bool = True
    """Whether a commit allows the deletion of older checkpoints, and a failure forbids the
    deletion."""


class Saver:
    """Writes the checkpoints of a strategy."""

    def __init__(self, options: CheckpointOptions, timeout: timedelta) -> None:
        self._options = options
        self._timeout = timeout
        self._buffer = HostBuffer()
        self._job: BackgroundJob | None = None
        self._group: AxisGroup | None = None
        self._rank = 0
        # Guards the state shared by the main thread and the job on the first rank:
        self._lock = threading.Lock()
        self._writing = self._failed = False
        self._to_delete: list[str] = []
        self.last: SaveReport | None = None
        """The last save. ``written_s`` is known at the next save or at the end of training."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Saver, (self._options, self._timeout))  # in another process nothing is being saved

    def save(self, plan: Save, context: ParallelContext, *, background: bool) -> None:
        """Write a checkpoint. All ranks call this.

        Raises:
            CheckpointError: On every rank, if a rank failed in this save or in the previous
                background save, and ``on_save_error`` is "raise". An existing checkpoint of the
                name is intact.
        """
        began = time.monotonic()
        self._rank = context.axis("world").rank
        # A save waits for the previous one: two at a time would double the copies in memory, and
        # could commit out of order.
        self.finish()
        with self._lock:
            self._writing = self._writing or plan.replaces
            self._to_delete = [path for path in self._to_delete if path != plan.path]
        try:
            # The background thread must not see the next step's values.
            snapshot = live = plan.take(context.axis("world"))
            if background:  # a host may run out of memory
                group = self.group(context)
                snapshot = together(
                    group, f"copying {plan.path}", lambda: self._buffer.copy_of(live)
                )
                self.last = SaveReport(
                    plan.path, time.monotonic() - began, num_bytes=snapshot.num_bytes
                )
                self._job = BackgroundJob(lambda: self._write(plan, snapshot, group, began))
                return
            self.last = SaveReport(plan.path, 0.0, num_bytes=snapshot.num_bytes)
            self._write(plan, snapshot, context.axis("world"), began)
            self.last = SaveReport(
                plan.path, time.monotonic() - began, self.last.written_s, snapshot.num_bytes
            )
        except CheckpointError as error:
            self._finish_save(plan, committed=False)
            self._report(error)

    def _write(self, plan: Save, snapshot: Snapshot, group: AxisGroup, began: float) -> None:
        """Write and commit, then run the deferred deletions."""
        committed = False
        try:
            plan.write(snapshot, group)
            committed = True
        finally:
            self._finish_save(plan, committed=committed)
        if self.last is not None:
            self.last = SaveReport(
                self.last.path, self.last.stall_s, time.monotonic() - began, self.last.num_bytes
            )

    def _finish_save(self, plan: Save, *, committed: bool) -> None:
        if not plan.replaces:
            return
        with self._lock:
            self._writing = False
            self._failed = not committed
            to_delete, self._to_delete = (
                (self._to_delete, []) if committed else ([], self._to_delete)
            )
        for path in to_delete:
            remove_checkpoint(path)

    def group(self, context: ParallelContext) -> AxisGroup:
        """Return all ranks with a communicator for background saves of CPU tensors. Creating the
        communicator is a collective.
        """
        world = context.axis("world")
        if self._group is None or self._group.ranks != world.ranks or self._group.is_broken:
            process_group = None
            if world.process_group is not None:
                process_group = dist.new_group(
                    backend="gloo", timeout=self._timeout, group_desc="checkpoint"
                )
            self._group = AxisGroup("checkpoint", world.ranks, world.rank, process_group)
        return self._group

    @property
    def writing_since(self) -> float | None:
        """Begin of the save now written in the background, in seconds of ``time.monotonic()``.
        None: no save is being written. Any thread may ask.
        """
        job = self._job
        return job.began_s if job is not None and job.running else None

    def finish(self) -> None:
        """Wait for the background save, if any."""
        if self._job is None:
            return
        error = self._job.wait()
        self._job = None
        if isinstance(error, CheckpointError):
            self._report(error)
        elif error is not None:
            raise CheckpointError(
                f"the save in the background failed: {type(error).__name__}: {error}"
            ) from error

    def finish_quietly(self) -> None:
        """Wait for the background save during the propagation of an exception. An error of the save
        becomes a warning.
        """
        try:
            self.finish()
        except CheckpointError as error:
            self._warn(str(error))

    def _report(self, error: CheckpointError) -> None:
        if self._options.on_save_error == "raise":
            raise error
        self._warn(f"A checkpoint was not saved, and training continues without it: {error}")

    def _warn(self, text: str) -> None:
        if self._rank == 0:
            warnings.warn(text, stacklevel=3)

    def remove(self, path: str) -> None:
        """Delete a checkpoint as soon as a newer checkpoint is committed. Called on the first
        rank.
        """
        with self._lock:
            if self._writing or self._failed:
                self._to_delete.append(path)
                return
        remove_checkpoint(path)
