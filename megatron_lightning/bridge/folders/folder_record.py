"""A model's Hugging Face folder, as kept in checkpoints: the table of tensors (names, shapes,
dtypes, files and headers), the other files, and the values of tensors ignored by the model. Export
and resume need no folder.

A model remembers the folder under an attribute outside of the model's state. Checkpoints keep the
folder under ``"hugging_face"``. See ``checkpoint.kept_files`` for the form.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.folders.folder import FolderTensors, HuggingFaceFolder, stale_buffers
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.folders.remembered_folders import (
    ATTRIBUTE,
    kept_folders,
    remember_texts,
    text_record,
)
from megatron_lightning.bridge.folders.safetensors_file import Header, StoredTensor, parse_header
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy, NoValuesError
from megatron_lightning.checkpoint.kept_files import KEPT, KeptFiles, kept_entry
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import WEIGHTS_INDEX
from megatron_lightning.parallel.shards.spec import Box, Shape

_MAX_CARRIED_BYTES = 64 << 20
_MAX_TABLE_BYTES = 1 << 30


class ChangedTable(NamedTuple):
    """Differences between a model's table and the table of the original folder."""

    added: dict[str, tuple[Shape, torch.dtype]]
    left_out: set[str]
    files: dict[str, bytes]
    """Files with other content, such as the configuration."""


class KeptFolder(FolderTensors):
    """Record of a folder. Only tensors ignored by the model have values.

    Args:
        path: The checkpoint, for messages.
        origin: Original folder or Hub id of the model. Empty: a configuration.
        revision: Branch, tag or commit of the Hub id.
        files: All files without tensors.
        tables: Name of a file of tensors -> header.
        ignored: Tensors ignored by the model's declaration -> values, or None if the values were
            too large to travel.
        gpt: Configuration and family of the ``GPTModel`` made of the folder. None: the untouched
            model was made.
        tied: Repeating tensor, such as a tied head -> repeated tensor, such as the embedding.
    """

    def __init__(
        self,
        path: Path,
        *,
        origin: str,
        revision: str | None,
        files: KeptFiles,
        tables: Mapping[str, Header],
        ignored: Mapping[str, bytes | None],
        gpt: Mapping[str, Any] | None = None,
        tied: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(path)
        self.origin = origin
        self.revision = revision
        self.ignored = ignored
        """Tensors ignored by the model -> values, or None."""
        self.gpt = gpt
        """``config`` and ``family`` of a ``GPTModel``. None: the untouched model."""
        self._files = files
        self._fills: Mapping[str, Fill] = {}
        self.tied = tied
        self.grown: tuple[int, int] | None = None
        """Rows of the embedding, and ids of the original folder's tokens, if there are more rows
        than in the folder."""
        for file, header in tables.items():
            self.add_file(file, header)
        # A tied copy is in no file, and is asked for by its own name.
        for copy, owner in tied.items():
            self.tensors[copy] = self.tensors[owner]

    @property
    def files(self) -> KeptFiles:
        """All other files: configuration, tokenizer, licences."""
        return self._files

    def read_from(self, fills: Mapping[str, Fill]) -> None:
        """Read the values of tensors from functions, such as fills of a checkpoint's parameters."""
        self._fills = fills

    def of_gpt(self, config: Mapping[str, Any], family: str | None) -> KeptFolder:
        """Return the folder for a ``GPTModel``. Values come from the same source as before.

        Args:
            config: Plain values of the model's configuration.
            family: Name or class path of the rules. None: the rules of the architecture.
        """
        return self._changed(gpt={"config": config, "family": family})

    def with_files(self, contents: Mapping[str, bytes]) -> KeptFolder:
        """Return the folder with other files beside the weights, by name."""
        return self._changed(files=KeptFiles(contents).to_state())

    def _changed(self, **entries: Any) -> KeptFolder:
        """Return the folder with other entries. Values come from the same source as before."""
        folder = _of_entry({**self.entry, **entries}, str(self.path))
        folder.read_from(self._fills)
        return folder

    @property
    def is_new(self) -> bool:
        """Whether no weights were there before the model's own."""
        return not self.origin

    @property
    def has_values(self) -> bool:
        """Whether the values of the model's parameters can be read, from a checkpoint."""
        return bool(self._fills)

    def __deepcopy__(self, memo: Any) -> KeptFolder:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_entry, (self.entry, str(self.path))

    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        if stored.name in self._fills:
            self._fills[stored.name](box, out)
            return
        content = self.ignored.get(stored.name)
        origin_tensor = None if content is not None else self._origin_tensor(stored)
        if origin_tensor is not None:
            origin_tensor.fill(box, out)
            return
        if stored.name not in self.ignored:
            raise NoValuesError(
                f"{self.path} has no weights: {stored.name} is known by shape and dtype only. Name "
                "a folder or a checkpoint with weights."
            )
        if content is None:
            raise CheckpointError(
                f"{self.path} does not hold the values of {stored.name}, a tensor of {self.origin} "
                "that the model ignores. Name that folder: --like FOLDER."
            )
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(stored.dtype)
        out.copy_(values.view(stored.shape)[box.slices])

    @cached_property
    def _origin_folder(self) -> HuggingFaceFolder | None:
        return HuggingFaceFolder(Path(self.origin)) if Path(self.origin).is_dir() else None

    def _origin_tensor(self, stored: StoredTensor) -> Lazy | None:
        """Return a large tensor ignored by the model, if the original folder still exists."""
        if stored.name not in self.ignored or self._origin_folder is None:
            return None
        tensor = self._origin_folder.tensors.get(stored.name)
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != (stored.shape, stored.dtype):
            return None
        return tensor

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The folder as plain data for a checkpoint."""
        digests = {
            name: None if content is None else hashlib.sha256(content).hexdigest()
            for name, content in self.ignored.items()
        }
        contents = {d: self.ignored[name] for name, d in digests.items() if d is not None}
        return {
            "origin": self.origin,
            "revision": self.revision,
            "files": self.files.to_state(),
            "tables": {file: zlib.compress(h.text, 1) for file, h in self.headers.items()},
            "ignored": digests,
            "contents": contents,
            "tied": dict(self.tied),
            **({} if self.gpt is None else {"gpt": dict(self.gpt)}),
            **({} if self.grown is None else {"grown": list(self.grown)}),
        }


def keep(
    folder: FolderTensors,
    used: Iterable[str],
    origin: str,
    revision: str | None,
    *,
    changed: ChangedTable | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> KeptFolder:
    """Return the folder's record for checkpoints.

    Args:
        folder: The folder, or a folder's record from a checkpoint.
        used: Names of the tensors read by the model.
        origin: Folder or Hub id, as named by the user. A record from a checkpoint keeps its own.
        revision: Branch, tag or commit of the Hub id.
        changed: Differences of the model from the folder's, if there are any.
        tied: See :class:`KeptFolder`.
    """
    if isinstance(folder, KeptFolder):
        if changed is None:
            return folder
        origin, revision = folder.origin, folder.revision
    # Tensors that the model ignores cannot be made of its parameters. Small ones travel with the
    # checkpoint, so that an export is complete.
    read_names = {*used, *tied}
    if changed is not None:
        read_names |= changed.left_out
    ignored: dict[str, bytes | None] = {}
    contents: dict[bytes, bytes] = {}  # masks of all layers are equal
    for name in (name for name in folder.tensors if name not in read_names):
        lazy = folder.tensors[name]
        ignored[name] = None
        if lazy.numel() * lazy.dtype.itemsize <= _MAX_CARRIED_BYTES:
            content = lazy.read().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            content = contents.setdefault(hashlib.sha256(content).digest(), content)
            if sum(map(len, contents.values())) <= _MAX_CARRIED_BYTES:
                ignored[name] = content
    tables = folder.headers
    files = folder.files
    if changed is not None:
        table = {
            name: (tuple(x.shape), x.dtype)
            for name, x in folder.tensors.items()
            if name not in changed.left_out
        }
        new = new_files(table | changed.added)
        contents_of = {**files.contents, **changed.files}
        tables = new.headers
        contents_of.pop(WEIGHTS_INDEX, None)
        if new.index_file is not None:
            contents_of[WEIGHTS_INDEX] = new.index_file
        files = KeptFiles(contents_of)
    return KeptFolder(
        folder.path,
        origin=origin,
        revision=revision,
        files=files,
        tables=tables,
        ignored=ignored,
        tied=tied,
    )


def remember(model: nn.Module, folder: KeptFolder) -> None:
    """Make a model remember the folder of the model."""
    model.__dict__[ATTRIBUTE] = folder


def recall(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Make the models of a loaded module remember the folders in the checkpoint, and the module the
    record of texts.
    """
    record = TextRecord.of_checkpoint(checkpoint, "the checkpoint")
    if record is not None and text_record(module) is None:
        remember_texts(module, record)
    folders = kept_folders(module)
    for path, entry in checkpoint.get(KEPT, {}).items():
        if path not in folders and isinstance(child := _child(module, path), nn.Module):
            remember(child, _of_entry(entry, "the checkpoint"))


def _child(module: nn.Module, path: str) -> object:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def read_kept(
    path: str | os.PathLike[str], model: str | None = None
) -> tuple[CheckpointSource, str, KeptFolder] | None:
    """Return a checkpoint, the path of a model in the LightningModule, and the model's folder. None
    if the checkpoint keeps no folder.

    Args:
        path: A checkpoint directory, plain file, or URL.
        model: Path of the model. None: the first model with a folder.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    source = open_checkpoint(path)
    entry = kept_entry(source.state(), model)
    return None if entry is None else (source, entry[0], _of_entry(entry[1], str(path)))


def _of_entry(entry: Mapping[str, Any], path: str) -> KeptFolder:
    """Return the folder described by a checkpoint's entry.

    Raises:
        CheckpointError: If the entry is damaged.
    """
    files = KeptFiles.from_state(entry.get("files"), path)
    try:
        tables = {name: _header(name, text, path) for name, text in entry["tables"].items()}
        contents = entry["contents"]
        # A damaged value must not reach an export.
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError("values of ignored tensors are not what was saved")
        ignored = {
            name: None if digest is None else contents[digest]
            for name, digest in entry["ignored"].items()
        }
        # Of a checkpoint from before such buffers were left out.
        stale = stale_buffers(ignored)
        ignored = {name: content for name, content in ignored.items() if name not in stale}
        folder = KeptFolder(
            Path(path),
            origin=str(entry["origin"]),
            revision=entry["revision"],
            files=files,
            tables=tables,
            ignored=ignored,
            gpt=entry.get("gpt"),
            tied=entry.get("tied", {}),
        )
        folder.leave_out(stale)
        if "grown" in entry:
            num_rows, num_trained = map(int, entry["grown"])
            folder.grown = (num_rows, num_trained)
        for name, content in ignored.items():
            lazy = folder.tensors[name]
            if content is not None and len(content) != lazy.numel() * lazy.dtype.itemsize:
                raise ValueError(f"{name} has {len(content)} bytes")
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise CheckpointError(
            f"{path}: the table of its Hugging Face folder is damaged ({error!r}). Name the folder "
            "that the model came from: --like FOLDER."
        ) from error
    return folder


def _header(name: str, packed: bytes, path: str) -> Header:
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{name!r} is no plain file name")
    packer = zlib.decompressobj()
    return parse_header(packer.decompress(packed, _MAX_TABLE_BYTES), None, Path(path) / name)


__all__ = ["KeptFolder", "keep", "read_kept", "recall", "remember"]
