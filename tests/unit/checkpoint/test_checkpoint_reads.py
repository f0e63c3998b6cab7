"""How bytes are read: in the order of the file, one range at a time, each verified, into the
tensors or through a buffer."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lightning.checkpoint.format.checksums import BlockChecksums
from megatron_lightning.checkpoint.format.manifest import BLOCK_BYTES, StoredShard
from megatron_lightning.checkpoint.format.shard_file import ReadQueue, plan_reads
from megatron_lightning.checkpoint.format.storage import LocalFolder, opened, read_range
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box

ROWS = 20
VALUES = torch.arange(ROWS * BLOCK_BYTES // 4, dtype=torch.int32).view(ROWS, -1)  # a block is a row
START = 24


class _Reader:
    """Serves a shard from memory, and notes which bytes were asked for and whether anybody else was
    reading."""

    num_streams = 1

    def __init__(self, data: bytes) -> None:
        self.data, self.positions, self.alone = data, list[int](), True
        self._busy = threading.Lock()

    def read_into(self, start: int, view: memoryview) -> None:
        self.alone &= self._busy.acquire(blocking=False)
        time.sleep(0.001)
        self.positions.append(start)
        view[:] = self.data[start - START : start - START + len(view)]
        self._busy.release()

    def close(self) -> None: ...


def _read(target: Tensor, reader: _Reader) -> None:
    checksums = BlockChecksums()
    checksums.update(VALUES.view(torch.uint8).numpy().data.cast("B"))
    shard = StoredShard("file", START, Box.full(VALUES.shape), checksums.finish())
    reads = ReadQueue(reader, plan_reads(shard, (0, 0), target, VALUES.dtype), "file")
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(reads.work) for _ in range(4)]:
            future.result()


# Straight into the tensor, and through a buffer.
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_threads_read_in_the_order_of_the_file(dtype: torch.dtype) -> None:
    reader, target = _Reader(VALUES.numpy().tobytes()), torch.zeros(VALUES.shape, dtype=dtype)
    _read(target, reader)
    assert (
        reader.alone and len(reader.positions) > 2 and reader.positions == sorted(reader.positions)
    )
    assert torch.equal(target, VALUES.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_bad_block_is_named(dtype: torch.dtype) -> None:
    data = bytearray(VALUES.numpy().tobytes())
    data[-5] ^= 1
    first = START + (ROWS - 1) * BLOCK_BYTES
    with pytest.raises(
        CheckpointError, match=f"bytes {first} to {first + BLOCK_BYTES} do not match"
    ):
        _read(torch.zeros(VALUES.shape, dtype=dtype), _Reader(bytes(data)))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on files")
@pytest.mark.parametrize("once", [True, False])
def test_who_reads_alone_lets_go_of_what_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    content = os.urandom(25 << 20)
    (tmp_path / "file").write_bytes(content)
    let_go: list[int] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            let_go.append(length)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with opened(LocalFolder(tmp_path), "file", len(content), once=once) as reader:
        read = b"".join(
            read_range(reader, start, 1 << 20) for start in range(0, len(content), 1 << 20)
        )
    assert read == content
    # Always behind the reader; 0 is the whole file.
    assert let_go == ([8 << 20, 16 << 20, 24 << 20, 0] if once else [])
