"""A Hugging Face folder as lazy tensors: safetensors files are mapped, and only filled boxes are
read.

Ranks of a machine share the page cache, so each byte comes from the disk once. The folder counts
the bytes read.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from megatron_lightning.bridge.folders.mapped_files import MappedFiles, file_status
from megatron_lightning.bridge.folders.new_files import header_of, new_files
from megatron_lightning.bridge.folders.safetensors_file import (
    Header,
    StoredTensor,
    read_header,
    unique_entries,
)
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import PICKLED_INDEX, PICKLED_WEIGHTS, WEIGHTS, WEIGHTS_INDEX
from megatron_lightning.parallel.shards.spec import Box, Shape

_STALE = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Buffers in files of earlier versions of ``transformers``, which computes them today."""
_MAX_INDEX_BYTES = 1 << 30
_WAY_OUT = "Download or restore the folder."


class Use(NamedTuple):
    """A use of a folder's tensor while a target on ``meta`` was filled."""

    name: str
    """Name in the folder."""
    box: Box
    """Range of the folder's tensor."""
    view: Tensor
    """Strided view of the target, at the place of the box."""


class FolderTensors(ABC):
    """The table of a folder's tensors: names, shapes, dtypes and files, in order.

    Args:
        path: The folder, or the checkpoint with the folder's table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.headers: dict[str, Header] = {}
        """File name -> header."""
        self.tensors: dict[str, Lazy] = {}
        """Name in the folder -> tensor, by file and position."""
        self._uses: list[Use] | None = None

    def add_file(self, file: str, header: Header) -> None:
        """Add a file and its tensors.

        Raises:
            CheckpointError: If a tensor is in another file, too.
        """
        self.headers[file] = header
        for stored in header.tensors:
            if stored.name in self.tensors:
                raise CheckpointError(
                    f"{self.path}: {stored.name} is in {self.file_of(stored.name)} and in {file}. "
                    "Keep one of the two files."
                )
            self.add(stored.name, stored.shape, stored.dtype, partial(self._read, file, stored))

    def add(self, name: str, shape: Shape, dtype: torch.dtype, read: Fill) -> None:
        """Add a tensor filled by ``read``."""
        self.tensors[name] = Lazy(shape, dtype, partial(self._fill, name, read))

    def leave_out(self, names: Collection[str]) -> None:
        """Remove tensors from the table and from the files' headers."""
        for name in names:
            del self.tensors[name]
        for file, header in list(self.headers.items()):
            kept = [stored for stored in header.tensors if stored.name not in names]
            if not kept:
                del self.headers[file]
            elif len(kept) < len(header.tensors):
                self.headers[file] = header_of({t.name: TensorInfo(t.shape, t.dtype) for t in kept})

    def file_of(self, name: str) -> str | None:
        """Return the file of a tensor."""
        files = (f for f, h in self.headers.items() if any(t.name == name for t in h.tensors))
        return next(files, None)

    @property
    @abstractmethod
    def files(self) -> KeptFiles:
        """All other files: configuration, tokenizer, licences."""

    @abstractmethod
    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        """Copy the values of a box of a stored tensor."""

    def _fill(self, name: str, read: Fill, box: Box, out: Tensor) -> None:
        """Fill a target, or record the use for a target on ``meta``."""
        if not out.is_meta:
            read(box, out)
        elif self._uses is not None:
            self._uses.append(Use(name, box, out))

    @contextmanager
    def recording(self) -> Iterator[list[Use]]:
        """Record in the block the boxes used for targets on ``meta``, without reading values."""
        uses: list[Use] = []
        self._uses = uses
        try:
            yield uses
        finally:
            self._uses = None


class HuggingFaceFolder(FolderTensors):
    """The tensors of a folder. Creation reads headers only.

    Args:
        path: The folder. A single file ``model.safetensors`` wins over an index, as in
            ``transformers``, and safetensors win over ``pytorch_model.bin``. Tensors of a pickle
            appear in safetensors files, as written by an export.
        has_stale: Whether buffers that ``transformers`` no longer saves are read. False: left out
            with a warning, as ``transformers`` does.

    Raises:
        CheckpointError: If the folder has no weights, an index is damaged or names a file outside
            of the folder, or a file is damaged.
    """

    def __init__(self, path: Path, *, has_stale: bool = True) -> None:
        super().__init__(path)
        self.bytes_read = 0
        """Bytes of tensors read so far."""
        self._mapped = MappedFiles(path, _WAY_OUT)
        self._pickled: dict[str, Tensor] = {}
        self._index_file: bytes | None = None  # of a pickle's tensors in safetensors files
        if (path / WEIGHTS).exists() or (path / WEIGHTS_INDEX).exists():
            self._add_files(path)
        else:
            self._add_pickles(path)
        if not has_stale and (names := stale_buffers(self.tensors)):
            self.leave_out(names)
            if not getattr(rank_zero_only, "rank", None):  # unset without ranks
                warnings.warn(
                    f"{path} has {len(names)} buffers ({names[0]}) that transformers computes, and "
                    "that its earlier versions saved. They are left out.",
                    stacklevel=2,
                )

    def _add_pickles(self, path: Path) -> None:
        self._pickled = _pickled(path)
        files = new_files({name: (tuple(x.shape), x.dtype) for name, x in self._pickled.items()})
        self._index_file = files.index_file
        for file, header in files.headers.items():
            self.add_file(file, header)

    def _add_files(self, path: Path) -> None:
        index = None if (path / WEIGHTS).exists() else _read_index(path)
        for file in [WEIGHTS] if index is None else sorted(set(index.values())):
            self._mapped.size(file)
            self.add_file(file, read_header(path / file))
        place = {t.name: file for file, header in self.headers.items() for t in header.tensors}
        if index is not None and (difference := _first_difference(index, place)):
            raise CheckpointError(
                f"{path / WEIGHTS_INDEX} says that {difference} is in "
                f"{index.get(difference, 'no file')}, and it is in "
                f"{place.get(difference, 'no file')}. Download or restore the folder."
            )

    @cached_property
    def files(self) -> KeptFiles:
        """All other files: configuration, tokenizer, licences."""
        contents = dict(KeptFiles.of_folder(self.path).contents)
        if self._index_file is not None:
            contents[WEIGHTS_INDEX] = self._index_file
        return KeptFiles(contents)

    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        self._count(prod(box.shape) * stored.dtype.itemsize)
        if not prod(box.shape):
            return
        if stored.name in self._pickled:
            out.copy_(self._pickled[stored.name][box.slices])
            return
        raw = torch.frombuffer(self._mapped.map(file), dtype=torch.uint8)[
            stored.start : stored.stop
        ]
        if stored.start % stored.dtype.itemsize:  # torch reads aligned values only
            raw = raw.clone()
        out.copy_(raw.view(stored.dtype).view(stored.shape)[box.slices])

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes


def stale_buffers(names: Iterable[str]) -> list[str]:
    """Return the names of buffers that ``transformers`` computes, and saved in earlier versions."""
    return [name for name in names if _STALE.search(name)]


def _read_index(path: Path, name: str = WEIGHTS_INDEX) -> Mapping[str, str] | None:
    """Return the index of a folder: name of a tensor -> file name. None: there is no index.

    Raises:
        CheckpointError: If the index is damaged or names a path.
    """
    index = path / name
    if not index.exists():
        return None
    try:
        size = file_status(index, _WAY_OUT).st_size
        if size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        text = index.read_bytes()
        entries: Any = json.loads(text, object_pairs_hook=unique_entries)["weight_map"]
        if not entries or not all(isinstance(file, str) for file in entries.values()):
            raise ValueError("weight_map is no table of file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error}). Download or restore the folder."
        ) from error
    # Names come from outside, and must not lead out of the folder.
    for tensor, file in entries.items():
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{index} says that {tensor} is in {file!r}, which is no plain file name. Nothing "
                "outside of the folder is read."
            )
    result: Mapping[str, str] = entries
    return result


def _pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder without safetensors. Pickles are mapped and may hold tensors
    only.

    Raises:
        CheckpointError: If the folder has no weights, or a pickle holds something else.
    """
    if not path.is_dir():
        raise MissingCheckpointError.at(path)
    index = _read_index(path, PICKLED_INDEX)
    files = [PICKLED_WEIGHTS] if index is None else sorted(set(index.values()))
    if index is None and not (path / PICKLED_WEIGHTS).exists():
        raise CheckpointError(
            f"{path} has neither {WEIGHTS} nor {WEIGHTS_INDEX} nor {PICKLED_WEIGHTS}, so it has "
            "no weights. Name a folder that save_pretrained of transformers has written."
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            # Mapped: values are read from the disk when they are used.
            loaded = torch.load(path / file, map_location="cpu", weights_only=True, mmap=True)
            others = [name for name, value in loaded.items() if not isinstance(value, Tensor)]
            if others:
                raise ValueError(f"{others[0]} is no tensor")
        except Exception as error:
            raise CheckpointError(
                f"{path / file} cannot be read as tensors ({str(error).splitlines()[0]}). Save the "
                "model as safetensors: model.save_pretrained(folder)."
            ) from error
        tensors |= loaded
    return tensors


def _first_difference(index: Mapping[str, str], file_of: Mapping[str, str]) -> str:
    """Return the first tensor with different files in index and folder. Empty: there is none."""
    names = (*index, *file_of)
    return next((name for name in names if index.get(name) != file_of.get(name)), "")
