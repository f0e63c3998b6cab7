"""Blank GPU code of other architectures, and debug information, in a shared library.

A library for many GPUs has one copy of its kernels for each architecture, in *fatbin* containers of
the ELF section ``.nv_fatbin``. ``__nv_relfatbin`` has the code before it was linked, which a GPU
whose linked code is there never reads. Payloads are overwritten by zeros; headers, offsets and the
size of the file stay, so that the library loads, and the zeros vanish when the file is compressed.

A container has a magic number, the size of its header (2 bytes at 6) and of its entries (8 bytes at
8). An entry has the size of its header (4 bytes at 4) and of its payload (8 bytes at 8), and its
architecture at 28: 90 for sm_90 and sm_90a.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

LINKED, UNLINKED = ".nv_fatbin", "__nv_relfatbin"
_DEBUG = (".debug_", ".nv_debug")
_MAGIC = 0xBA55ED50
_ARCH_AT = 28
_NO_BITS = 8
"""Type of sections without bytes in the file."""


class Counts(NamedTuple):
    """Bytes of a library."""

    kept: int
    """GPU code that stays."""
    blanked: int
    """GPU code that does not."""
    debug: int


class _Section(NamedTuple):
    name: str
    start: int
    size: int


def prune(library: Path, keep: Collection[int]) -> Counts:
    """Blank, in place, linked GPU code of architectures that are not in ``keep``, all unlinked
    code, and debug sections.

    Raises:
        ValueError: If the file is no 64-bit ELF library, has a container that cannot be read, or
            would lose all its GPU code.
    """
    kept = blanked = debug = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as elf:
        for section in _sections(elf):
            if section.name.startswith(_DEBUG):
                elf[section.start : section.start + section.size] = bytes(section.size)
                debug += section.size
            elif section.name in (LINKED, UNLINKED):
                for arch, start, size in _payloads(elf, section):
                    if arch in keep and section.name == LINKED:
                        kept += size
                    else:
                        elf[start : start + size] = bytes(size)
                        blanked += size
    if blanked and not kept:
        wanted = ", ".join(f"sm_{arch}" for arch in sorted(keep))
        raise ValueError(f"{library} has no GPU code for {wanted}. Keep another architecture.")
    return Counts(kept, blanked, debug)


def _sections(elf: mmap.mmap) -> Iterator[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit little-endian ELF library.")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    # Of each header: name, type, flags, address, offset in the file, size.
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, start, size in headers:
        if kind != _NO_BITS:
            at = names + name
            yield _Section(elf[at : elf.find(b"\0", at)].decode(), start, size)


def _payloads(elf: mmap.mmap, section: _Section) -> Iterator[tuple[int, int, int]]:
    """Yield architecture, offset and size of the code in a section."""
    position, stop = section.start, section.start + section.size
    while position + 16 <= stop:
        if struct.unpack_from("<I", elf, position)[0] != _MAGIC:
            position += 8  # padding between containers
            continue
        header_size, content_size = struct.unpack_from("<HQ", elf, position + 6)
        entry, end = position + header_size, position + header_size + content_size
        while entry < end:
            entry_header, size = struct.unpack_from("<IQ", elf, entry + 4)
            (arch,) = struct.unpack_from("<I", elf, entry + _ARCH_AT)
            body = entry + entry_header
            if not entry_header or body + size > end:
                raise ValueError(f"{section.name} has a broken entry at byte {entry}.")
            yield arch, body, size
            entry = body + size
        position = end
