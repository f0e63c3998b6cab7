"""Writer of the format ``torch_dist``: parts of tensors and objects, each an archive of
``torch.save``, and a table of torch's own classes.

The table is a pickle of classes of ``torch.distributed.checkpoint``, as torch's own writer leaves
it. Values are written part by part, so that a part is in memory at a time.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as Place
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_lightning.bridge.megatron_checkpoints.torch_dist import ABOUT, TABLE
from megatron_lightning.checkpoint.format.files import sync_directory, write_file
from megatron_lightning.parallel.shards.spec import Box, Shape

_FILE_BYTES = 4 << 30


class WrittenPart(NamedTuple):
    """A box of a tensor to be written."""

    box: Box
    read: Callable[[], Tensor]
    """Returns the values, in the box's shape."""


class TorchDistWriter:
    """Writes a checkpoint into an existing folder.

    Args:
        folder: Has no files yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table: dict[str, Any] = {}
        self._places: dict[MetadataIndex, Any] = {}
        self._file: IO[bytes] | None = None
        self._num_files = 0

    def put_tensor(
        self, key: str, shape: Shape, dtype: torch.dtype, parts: Iterable[WrittenPart]
    ) -> None:
        """Write a tensor. Its parts tile ``shape``."""
        chunks = []
        for number, (box, read) in enumerate(parts):
            offset, sizes = torch.Size(box.offset), torch.Size(box.shape)
            chunks.append(ChunkStorageMetadata(offset, sizes))
            self._put(MetadataIndex(key, offset, number), read().to(dtype).contiguous())
        self._table[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(shape), chunks
        )

    def put_object(self, key: str, number: tuple[int, ...], count: tuple[int, ...]) -> None:
        """Write an empty object: one of ``count``, such as the state of a layer of another
        backend.
        """
        here, all_of = (".".join(map(str, sizes)) for sizes in (number, count))
        name = f"{key}/shard_{here}_{all_of}"
        self._put(MetadataIndex(name), [None])
        self._table[name] = BytesStorageMetadata()

    def finish(self) -> None:
        """Write the table, and what says the format. The files are on the disk afterwards."""
        self._close()
        table = Metadata(self._table, storage_data=self._places, storage_meta=StorageMeta())
        write_file(self._folder / TABLE, [pickle.dumps(table)])
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_file(self._folder / ABOUT, [json.dumps(about).encode()])
        sync_directory(self._folder)

    def close(self) -> None:
        """Close the file under way, after an error."""
        if self._file is not None:
            self._file.close()

    def _put(self, index: MetadataIndex, value: Any) -> None:
        if self._file is None or self._file.tell() >= _FILE_BYTES:
            self._close()
            self._file = (self._folder / f"__0_{self._num_files}.distcp").open("xb")
            self._num_files += 1
        start = self._file.tell()
        torch.save(value, self._file)
        self._places[index] = Place(Path(self._file.name).name, start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def archive(value: Any) -> bytes:
    """Return a value as an archive of ``torch.save``."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
