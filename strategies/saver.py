"""When checkpoints are written and when old ones go: at once or in the background, and never the last good one.

Callbacks delete an old checkpoint as soon as the Trainer's save returns. While the new one is still being written, or if it
failed, the old one is all there is; so deletions wait for a commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.checkpoint import remove_checkpoint
from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.background import BackgroundJob, HostBuffer
from megatron_lightning.checkpoint.saving import Snapshot
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.strategies.links import PendingLinks


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


@dataclass(frozen=True)
class Save:
    """What is to be saved, and how."""

    path: str
    """Name that the save is known by."""
    take: Callable[[AxisGroup], Snapshot]
    """Collects what this rank writes, while training waits; all ranks call it."""
    write: Callable[[Snapshot, AxisGroup], None]
    """Writes and commits it, over the group given; all ranks call it."""
    replaces: bool = True
    """Whether older checkpoints may go when it is committed, and must stay when it failed."""
    links: Sequence[Path] | None = None
    """Where links are that wait for the commit, on the first rank; None: there is nobody who makes any."""
    settled: Callable[[bool], None] = lambda committed: None
    """Called on every rank, by the thread that trains, with whether it was committed, when that is known there."""


class Saver:
    """Writes the checkpoints of one strategy.

    Args:
        options: The strategy's checkpoint options.
        timeout: Limit of a collective of the background's own process group.
    """

    def __init__(self, options: CheckpointOptions, timeout: timedelta) -> None:
        self._options, self._timeout = options, timeout
        self._buffer = HostBuffer()
        self._job: tuple[BackgroundJob, Save] | None = None
        self._group: AxisGroup | None = None
        self._lock = threading.Lock()  # of what the main thread and the job share on the first rank:
        self._writing = self._failed = False
        self._doomed: list[str] = []
        self._links: PendingLinks | None = None
        self.last: SaveReport | None = None
        """The save before; its ``written_s`` is known when the next one begins, or training ends."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Saver, (self._options, self._timeout))  # in another process nothing is being saved

    def save(self, plan: Save, context: ParallelContext, *, background: bool) -> None:
        """Write a checkpoint; all ranks call this.

        Raises:
            CheckpointError: On every rank, if one failed in this save, or in the one before that ran in the background, and
                ``on_save_error`` is "raise". What stood under the name is intact.
        """
        began = time.monotonic()
        self.finish()
        with self._lock:
            self._writing = self._writing or plan.replaces
            if plan.replaces:  # where links lead now that the save before is settled
                self._links = PendingLinks(Path(plan.path), plan.links) if plan.links is not None else None
            self._doomed = [doomed for doomed in self._doomed if doomed != plan.path]
        try:
            snapshot = live = plan.take(context.axis("world"))
            if background:  # a host may lack the memory
                group = self.group(context)
                snapshot = together(group, f"copying {plan.path}", lambda: self._buffer.copy_of(live))
                self.last = SaveReport(plan.path, time.monotonic() - began, num_bytes=snapshot.num_bytes)
                self._job = BackgroundJob(lambda: self._write(plan, snapshot, group, began)), plan
                return
            self.last = SaveReport(plan.path, 0.0, num_bytes=snapshot.num_bytes)
            self._write(plan, snapshot, context.axis("world"), began)
            self.last = SaveReport(plan.path, time.monotonic() - began, self.last.written_s, snapshot.num_bytes)
            plan.settled(True)
        except CheckpointError as error:
            self._settle(plan, committed=False)
            plan.settled(False)
            self._report(error)

    def _write(self, plan: Save, snapshot: Snapshot, group: AxisGroup, began: float) -> None:
        """Write and commit; afterwards delete what had to wait for it."""
        committed = False
        try:
            plan.write(snapshot, group)
            committed = True
        finally:
            self._settle(plan, committed=committed)
        if self.last is not None:
            self.last = SaveReport(self.last.path, self.last.stall_s, time.monotonic() - began, self.last.num_bytes)

    def _settle(self, plan: Save, *, committed: bool) -> None:
        if not plan.replaces:
            return
        with self._lock:
            self._writing, self._failed = False, not committed
            doomed, self._doomed = (self._doomed, []) if committed else ([], self._doomed)
            if committed and self._links is not None:
                self._links.release()
        for path in doomed:
            remove_checkpoint(path)

    def group(self, context: ParallelContext) -> AxisGroup:
        """Return all ranks with a communicator for CPU tensors that only background saves use; all ranks make it together."""
        world = context.axis("world")
        if self._group is None or self._group.ranks != world.ranks or self._group.is_broken:
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
        if self._job is None:
            return
        (job, plan), self._job = self._job, None
        error = job.wait()
        plan.settled(error is None)
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

    def spare(self, keeps: Callable[[str], bool]) -> None:
        """Give up deletions that wait for a commit, of checkpoints for which ``keeps`` is true."""
        with self._lock:
            self._doomed = [path for path in self._doomed if not keeps(path)]

    @property
    def awaits_links(self) -> bool:
        """Whether a link may be made, on this rank, to a checkpoint that is not committed."""
        return self._links is not None and (self._writing or self._failed)

    def hold_links(self, links: Iterable[Path]) -> None:
        """Let links to the checkpoint being written wait for its commit; called on the first rank after they were made."""
        with self._lock:
            if self._links is not None and self.awaits_links:
                self._links.hold(links)
