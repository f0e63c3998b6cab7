"""CRC-32 of blocks, by ISA-L's carry-less multiplication, or by zlib on platforms without a build
of ``isal``.

CRC-32 detects every change of up to 32 neighboring bits, and misses any other damage of a block
once in 2^32. Both libraries give the same numbers and release the interpreter's lock, and so
overlap disk I/O. zlib takes about four times the processor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lightning.checkpoint.format.manifest import BLOCK_BYTES

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


class BlockChecksums:
    """CRC-32 of each block of ``BLOCK_BYTES`` of a stream of bytes."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._current = 0
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the stream."""
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            self._current = crc32(part, self._current)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._finished.append(self._current)
                self._current = 0
                self._filled = 0

    def finish(self) -> tuple[int, ...]:
        """Return the checksums. The last block may be shorter."""
        return (*self._finished, self._current) if self._filled else tuple(self._finished)


def bad_blocks(data: memoryview, checksums: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first byte, byte after the last) of each block of ``data`` with a differing checksum.
    ``checksums`` may be longer.
    """
    for index, begin in enumerate(range(0, len(data), BLOCK_BYTES)):
        block = data[begin : begin + BLOCK_BYTES]
        if crc32(block) != checksums[index]:
            yield begin, begin + len(block)
