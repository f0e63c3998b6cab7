"""Small saves over two forked ranks that can be hurt at any point, and what a directory holds
afterwards.

Every value of a checkpoint is a function of its version, so that a mixture of two saves is told
from either.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from megatron_lightning.checkpoint import TensorShards, is_committed, open_checkpoint, save_sharded
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.checkpoint.writing.background import BackgroundJob, HostBuffer
from megatron_lightning.checkpoint.writing.saving import take_snapshot, write_snapshot
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import Shard

ROWS, COLUMNS, NUM_TENSORS = 64, 24, 5
MAX_FILE_BYTES = 16_000  # some files a rank
HANG_S = 60.0
Save = Callable[[str, int, AxisGroup], None]


class _Upload(io.BytesIO):
    """Becomes a file when it is closed, in one step."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            part = Path(self._path).parents[2] / f"upload-{uuid.uuid4().hex}"
            part.write_bytes(self.getvalue())
            os.replace(part, self._path)
        super().close()


class Bucket(LocalFileSystem):  # type: ignore[misc]
    """A directory that behaves as an object store: ``bucket:///path``. Objects appear whole, and
    nothing can be renamed."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any
    ) -> Any:
        return super()._open(path, mode, block_size, **options) if mode == "rb" else _Upload(path)

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("an object store cannot rename")


fsspec.register_implementation("bucket", Bucket, clobber=True)


def value(name: str, version: int) -> Tensor:
    """Return a tensor of a version."""
    generator = torch.Generator().manual_seed(1000 * version + sum(map(ord, name)))
    return torch.rand(ROWS, COLUMNS, generator=generator)


def names() -> list[str]:
    """Return the tensors of a checkpoint."""
    return [f"state_dict.layers.{i}.weight" for i in range(NUM_TENSORS)]


def shards(version: int, group: AxisGroup) -> list[TensorShards]:
    """Return this rank's rows of every tensor."""
    rows = ROWS // group.size
    first = rows * group.rank
    shape = (ROWS, COLUMNS)
    return [
        TensorShards(
            n, shape, torch.float32, [Shard((first, 0), value(n, version)[first : first + rows])]
        )
        for n in names()
    ]


def save(path: str, version: int, group: AxisGroup) -> None:
    """Save a version; returns when it is committed."""
    save_sharded(
        path,
        shards(version, group),
        {"version": version},
        group=group,
        max_file_bytes=MAX_FILE_BYTES,
    )


def save_in_background(path: str, version: int, group: AxisGroup) -> None:
    """Save a version as training does it with ``async_save``: the tensors change while they are
    written."""
    live = shards(version, group)
    snapshot = HostBuffer().copy_of(take_snapshot(path, live, {"version": version}, group=group))
    job = BackgroundJob(lambda: write_snapshot(snapshot, group, MAX_FILE_BYTES))
    for tensor in (view for entry in live for _, view in entry.shards):
        tensor.zero_()
    error = job.wait()
    if error is not None:
        raise error


def alone() -> AxisGroup:
    """Return the group of a single process."""
    return AxisGroup("alone", (0,), 0, None)


def version_of(path: str | Path) -> int | None:
    """Load everything; return the version that all of it belongs to, None if nothing is committed.

    Raises:
        CheckpointError: If something is damaged.
        AssertionError: If it was loaded without an error and is not one version.
    """
    if not is_committed(path):
        return None
    source = open_checkpoint(path)
    version: int = source.state()["version"]
    assert set(source.tensors()) == set(names())
    for name in names():
        tensor = torch.empty(ROWS, COLUMNS)
        source.read([(name, Shard((0, 0), tensor))])
        assert torch.equal(tensor, value(name, version)), f"{name} is not of version {version}"
    return version


def sound_version_of(path: str | Path) -> int | None:
    """Return the version of a checkpoint, all of whose bytes must be sound."""
    version = version_of(path)
    assert version is None or verify(path) == []
    return version


class Fuse:
    """Counts what Python does in all threads and fires at one point: between any two calls, also
    inside of libraries.

    Args:
        fire_at: The event at which ``fire`` is called, counted from :meth:`light`; None: never.
        fire: Kills or hurts the process.
    """

    def __init__(self, fire_at: int | None, fire: Callable[[], None]) -> None:
        self.count, self._fire_at, self._fire = 0, fire_at, fire

    def light(self) -> None:
        """Start counting, in this thread and in those that start later."""
        threading.setprofile(self._tick)
        sys.setprofile(self._tick)

    def _tick(self, *_: Any) -> None:
        self.count += 1
        if self.count == self._fire_at:
            self._fire()


def die() -> None:
    """Kill this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_two(job: Callable[[int, AxisGroup], None]) -> list[int]:
    """Run ``job(rank, group)`` in two forked ranks.

    Returns:
        How each ended: 0, 3 after an exception, minus the number of the signal that killed it.

    Raises:
        AssertionError: If one hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, f"{folder}/store", job) for rank in range(2)]
        return wait_all(ranks)


def _fork(rank: int, store: str, job: Callable[[int, AxisGroup], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traces of those that lost their peer
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2"
        )
        file_store = dist.FileStore(store, 2)
        dist.init_process_group(
            "gloo", store=file_store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
        job(rank, AxisGroup("world", (0, 1), rank, dist.group.WORLD))
        code = 0
    finally:
        os._exit(code)


def wait_all(children: Sequence[int]) -> list[int]:
    """Wait for forked processes and return how they ended.

    Raises:
        AssertionError: If one hangs; all are killed then.
    """
    ends: dict[int, int] = {}
    deadline = time.monotonic() + HANG_S
    while len(ends) < len(children) and time.monotonic() < deadline:
        for child in set(children) - ends.keys():
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                ends[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    hanging = set(children) - ends.keys()
    for child in hanging:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not hanging, f"{len(hanging)} processes hung for {HANG_S} s"
    return [ends[child] for child in children]
