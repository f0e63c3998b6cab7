"""Whichever library counts: checksums are zlib's CRC-32 of each block."""

from __future__ import annotations

import zlib

import pytest
import torch

from megatron_lightning.checkpoint.format.checksums import BlockChecksums, bad_blocks, crc32
from megatron_lightning.checkpoint.format.manifest import BLOCK_BYTES


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345])
def test_blocks_are_counted_whatever_the_parts(length: int) -> None:
    data = (
        torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        .numpy()
        .tobytes()
    )
    checksums = BlockChecksums()
    for start in range(0, length, 700_001):
        checksums.update(memoryview(data)[start : start + 700_001])
    expected = tuple(
        zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, length, BLOCK_BYTES)
    )
    assert checksums.finish() == expected
    assert list(bad_blocks(memoryview(data), expected)) == []
    if length > BLOCK_BYTES:
        spoilt = bytearray(data)
        spoilt[-1] ^= 128
        assert list(bad_blocks(memoryview(spoilt), expected)) == [(2 * BLOCK_BYTES, length)]


def test_the_fast_library_counts_the_same() -> None:
    pytest.importorskip("isal")
    assert (
        crc32.__module__ != "zlib" and crc32(b"123456789") == zlib.crc32(b"123456789") == 0xCBF43926
    )
