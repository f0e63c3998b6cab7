"""Pickles read as records: no code of a pickle runs, and no class is imported.

An allowed class is replaced by :class:`Record`, which keeps name, arguments and state. Any other
class is an error that names it. Archives of ``torch.save`` are read by the same means: the pickle
in an archive says the strides of the values, which lie beside the pickle as raw bytes.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Set
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.shards.spec import Shape

_MAX_ENTRY_BYTES = 1 << 16
_STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
_ARCHIVE: Mapping[str, Set[str]] = {
    "torch": frozenset(_STORAGES),
    "torch._utils": frozenset({"_rebuild_tensor_v2"}),
    "collections": frozenset({"OrderedDict"}),
}


class Record:
    """An object in a pickle, as words: nothing is made of the object.

    Args:
        name: The object's class or function.
        arguments: Arguments of the class or function.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[str, Set[str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if name not in self._allowed.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return _record_class(name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _record_class(name: str) -> Any:
    """Return a class that makes records of a name: pickles call classes, and call ``__new__`` of
    classes.
    """

    class Named(Record):
        def __new__(cls, *arguments: Any) -> Named:
            record = super().__new__(cls)
            Record.__init__(record, name, *arguments)
            return record

        def __init__(self, *_: Any) -> None:
            """See ``__new__``."""

    Named.__name__ = name
    return Named


def unpickle(data: bytes, allowed: Mapping[str, Set[str]]) -> Any:
    """Return the plain values and records of a pickle.

    Args:
        data: The pickle.
        allowed: Module -> names of classes and functions that may occur. Dtypes of torch may occur
            as well.

    Raises:
        Exception: Any, if the pickle is damaged.
    """
    return _Reader(data, allowed).load()


def read_archive(archive: memoryview, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the tensor in an archive of ``torch.save``: a view of the archive's memory.

    Args:
        archive: The archive, in writable memory.
        shape: The tensor's shape.
        dtype: The tensor's dtype.

    Raises:
        Exception: Any, if the archive is damaged or holds another tensor.
    """
    with zipfile.ZipFile(_Stream(archive)) as entries:
        by_name = {name.partition("/")[2]: name for name in entries.namelist()}
        order = _entry(entries, by_name["byteorder"]) if "byteorder" in by_name else b"little"
        if order != b"little":
            raise ValueError(f"its values are {order[:16]!r} endian")
        call = unpickle(_entry(entries, by_name["data.pkl"]), _ARCHIVE)
        storage, offset, size, strides = call.arguments[:4]
        stored_dtype = _STORAGES.get(getattr(storage[1], "__name__", ""))
        if tuple(size) != shape or stored_dtype != dtype:
            raise ValueError(f"it holds {tuple(size)} {stored_dtype}, and not {shape} {dtype}")
        values = entries.getinfo(by_name[f"data/{storage[2]}"])
    if values.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its values are compressed")
    # A zip's local header has name and extra fields of its own lengths before the data (APPNOTE
    # 4.3.7).
    at = values.header_offset
    name, extra = (int.from_bytes(archive[at + i : at + i + 2], "little") for i in (26, 28))
    start = at + 30 + name + extra
    count, itemsize = values.file_size // dtype.itemsize, dtype.itemsize
    if start + values.file_size > len(archive):
        raise ValueError("its values are cut off")
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    # Strides and offset are data from outside: every element must lie inside the storage.
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if min(offset, *strides, 0) < 0 or last >= count:
        raise ValueError(f"it has {count:,} values, and element {last:,} is asked for")
    raw = torch.frombuffer(archive, dtype=torch.uint8, count=count * itemsize, offset=start)
    if raw.data_ptr() % itemsize:  # torch reads aligned values only
        raw = raw.clone()
    return raw.view(dtype).as_strided(shape, strides, offset)


def _entry(entries: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a small entry.

    Raises:
        ValueError: If the entry is large: a few bytes may inflate to the size of the memory.
    """
    about = entries.getinfo(name)
    if about.file_size > _MAX_ENTRY_BYTES:
        raise ValueError(f"{name} of a tensor has {about.file_size:,} bytes")
    return entries.read(about)


class _Stream(io.RawIOBase):
    """Memory as a file, without a copy of the memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


__all__ = ["Record", "read_archive", "unpickle"]
