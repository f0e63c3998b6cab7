"""A Hugging Face folder as lazy tensors: its safetensors files are mapped, and only the boxes that
are filled are read.

Ranks of one machine share its page cache, so each byte comes from the disk once. The folder counts
the bytes that it reads.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.bridge.lazy import Lazy
from megatron_lightning.bridge.safetensors_file import Header, StoredTensor, read_header
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.parallel.spec import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_MAX_INDEX_BYTES = 1 << 30


class Use(NamedTuple):
    """One use of a folder's tensor while a target on ``meta`` was filled."""

    name: str
    """Name in the folder."""
    box: Box
    """Range of the folder's tensor."""
    view: Tensor
    """Where the target has it: a strided view of the target."""


class HuggingFaceFolder:
    """The tensors of a folder; creating it reads headers only.

    Args:
        path: The folder. A single file ``model.safetensors`` wins over an index, as in
            ``transformers``, and safetensors win over ``pytorch_model.bin``.

    Raises:
        CheckpointError: If the folder has no weights, an index is damaged or names a file outside
            of the folder, or a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        """Bytes of tensors that were read so far."""
        self.headers: dict[str, Header] = {}
        """File name -> its header."""
        self.tensors: dict[str, Lazy] = {}
        """Name in the folder -> tensor, by file and position."""
        self._maps: dict[str, mmap.mmap] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._uses: list[Use] | None = None
        file_of: dict[str, str] = {}
        index = None if (path / SINGLE).exists() else _read_index(path)
        if index is None and not (path / SINGLE).exists():
            self.tensors = _pickled(path, self._count)
            return
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._stamps[file] = _stamp(path / file)
            self.headers[file] = read_header(path / file)
            for stored in self.headers[file].tensors:
                if stored.name in file_of:
                    raise CheckpointError(
                        f"{path}: {stored.name} is in {file_of[stored.name]} and in {file}. Keep "
                        "one of the two files."
                    )
                file_of[stored.name] = file
                fill = partial(self._fill, file, stored)
                self.tensors[stored.name] = Lazy(stored.shape, stored.dtype, fill)
        if index is not None and (wrong := _first_difference(index, file_of)):
            raise CheckpointError(
                f"{path / INDEX} says that {wrong} is in {index.get(wrong, 'no file')}, and it is "
                f"in {file_of.get(wrong, 'no file')}. Download or restore the folder."
            )

    def _fill(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        """Copy the values of a box of a stored tensor; on ``meta``, record the use."""
        if out.is_meta:
            if self._uses is not None:
                self._uses.append(Use(stored.name, box, out))
            return
        self._count(prod(box.shape) * stored.dtype.itemsize)
        if not prod(box.shape):
            return
        raw = torch.frombuffer(self._map(file), dtype=torch.uint8)[stored.start : stored.stop]
        if stored.start % stored.dtype.itemsize:  # torch reads aligned values only
            raw = raw.clone()
        out.copy_(raw.view(stored.dtype).view(stored.shape)[box.slices])

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes

    def _map(self, file: str) -> mmap.mmap:
        """Return the mapped file.

        Raises:
            CheckpointError: If the file has changed since its header was read.
        """
        if file not in self._maps:
            with (self.path / file).open("rb") as stream:
                # Private pages, since torch wants memory that could be written.
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        # A file that became shorter would end the process with a bus error.
        if _stamp(self.path / file) != self._stamps[file]:
            raise CheckpointError(
                f"{self.path / file} has changed while it was read. Load the folder again when "
                "nobody writes to it."
            )
        return self._maps[file]

    @contextmanager
    def recording(self) -> Iterator[list[Use]]:
        """Record in the block which boxes are used for targets on ``meta``, which read nothing."""
        uses: list[Use] = []
        self._uses = uses
        try:
            yield uses
        finally:
            self._uses = None


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing ({error.strerror}). Download or restore the folder."
        ) from error
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_index(path: Path, name: str = INDEX) -> Mapping[str, str] | None:
    """Return the index of a folder: name of a tensor -> file name; None: there is no index.

    Raises:
        CheckpointError: If the index is damaged or names a path.
    """
    index = path / name
    if not index.exists():
        return None
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {index.stat().st_size:,} bytes")
        entries: Any = json.loads(index.read_bytes())["weight_map"]
        if not entries or not all(isinstance(file, str) for file in entries.values()):
            raise ValueError("weight_map is no table of file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error}). Download or restore the folder."
        ) from error
    for tensor, file in entries.items():
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{index} says that {tensor} is in {file!r}, which is no plain file name. Nothing "
                "outside of the folder is read."
            )
    result: Mapping[str, str] = entries
    return result


def _pickled(path: Path, count: Callable[[int], None]) -> dict[str, Lazy]:
    """Return the tensors of a folder without safetensors, whose pickles are mapped and may hold
    tensors only.

    Raises:
        CheckpointError: If the folder has no weights, or a pickle holds something else.
    """
    if not path.is_dir():
        raise MissingCheckpointError.at(path)
    index = _read_index(path, f"{_PICKLE}.index.json")
    files = [_PICKLE] if index is None else sorted(set(index.values()))
    if index is None and not (path / _PICKLE).exists():
        raise CheckpointError(
            f"{path} has neither {SINGLE} nor {INDEX} nor {_PICKLE}, so it has no weights. Name a "
            "folder that save_pretrained of transformers has written."
        )
    tensors: dict[str, Lazy] = {}
    for file in files:
        try:
            loaded = torch.load(path / file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(
                f"{path / file} cannot be read as tensors ({str(error).splitlines()[0]}). Save the "
                "model as safetensors: model.save_pretrained(folder)."
            ) from error
        for name, values in loaded.items():
            tensors[name] = Lazy(values.shape, values.dtype, partial(_copy_box, values, count))
    return tensors


def _copy_box(values: Tensor, count: Callable[[int], None], box: Box, out: Tensor) -> None:
    if not out.is_meta:
        count(prod(box.shape) * values.dtype.itemsize)
        out.copy_(values[box.slices])


def _first_difference(index: Mapping[str, str], file_of: Mapping[str, str]) -> str:
    """Return the first tensor that index and files place differently; empty: there is none."""
    names = (*index, *file_of)
    return next((name for name in names if index.get(name) != file_of.get(name)), "")
