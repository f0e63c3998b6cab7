"""Checkpoints of Megatron-Core in the format ``torch_dist``, as lazy tensors.

    latest_checkpointed_iteration.txt    "7", or "release"
    iter_0000007/metadata.json           {"sharded_backend": "torch_dist", ...}
    iter_0000007/.metadata               a pickle: every tensor's parts, and their places in files
    iter_0000007/__0_0.distcp            parts of tensors, each an archive of ``torch.save``

NeMo 2.0 writes such a folder as ``NAME/weights``, and ``module.`` before every name.

Pickles run no code here:
:mod:`~megatron_lightning.bridge.megatron_checkpoints.inert_pickle` replaces each of the few
allowed classes by a record of what was pickled. Values are read from mapped files. Objects
(``_extra_state``, ``common.pt``) are never read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.bridge.folders.mapped_files import MappedFiles, file_status
from megatron_lightning.bridge.megatron_checkpoints.inert_pickle import (
    Record,
    read_archive,
    unpickle,
)
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.parallel.shards.spec import Box, Shape

TRACKER, ABOUT, TABLE = "latest_checkpointed_iteration.txt", "metadata.json", ".metadata"
_NEMO_FOLDER, _NEMO_PREFIX = (
    "weights",
    re.compile(r"^((?:.*?optimizer\.state\.\w+\.)?)module\.(.+)"),
)
_FORMAT = "torch_dist"
_MAX_TABLE_BYTES = 4 << 30
_MAX_TEXT_BYTES = 1 << 20
_WAY_OUT = "Copy the checkpoint again."
_DCP = "torch.distributed.checkpoint"
_CLASSES: Mapping[str, frozenset[str]] = {
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo"}),
    f"{_DCP}.metadata": frozenset({
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    }),
    f"{_DCP}.planner": frozenset({"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset({
        "MCoreMetadata", "MCoreSavePlan",
    }),
}  # fmt: skip


class Part(NamedTuple):
    """A box of a tensor, and the place of the values."""

    box: Box
    file: str
    start: int
    stop: int


def is_megatron(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a checkpoint of Megatron-LM or Megatron Bridge, readable or
    not.
    """
    folder = _inside_nemo(Path(path))
    marks = (TRACKER, ABOUT, TABLE)
    return (
        folder.is_dir()
        and not (folder / CONFIG).exists()
        and (any((folder / name).exists() for name in marks) or _is_legacy(folder))
    )


def _inside_nemo(path: Path) -> Path:
    inside = path / _NEMO_FOLDER
    return inside if (inside / ABOUT).exists() and not (path / ABOUT).exists() else path


def _is_legacy(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*/model_optim_rng.pt"))


class MegatronFolder:
    """The tensors of a checkpoint. Creation reads the table only.

    Args:
        path: The checkpoint of an iteration, or the folder of all checkpoints with the tracker
            file, which names the last one.

    Raises:
        CheckpointError: If the checkpoint has another format, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = _iteration_of(path)
        """The checkpoint."""
        _check_format(self.path)
        self._mapped = MappedFiles(self.path, _WAY_OUT)
        self.tensors: dict[str, Lazy] = {}
        """Name in Megatron-Core -> tensor."""
        try:
            table = _fields(unpickle(self._table(), _CLASSES), "Metadata")
            places = self._places(table["storage_data"])
            for key, entry in table["state_dict_metadata"].items():
                if _is(entry, "TensorStorageMetadata"):
                    name = _NEMO_PREFIX.sub(r"\1\2", str(key))
                    self.tensors[name] = self._tensor(str(key), entry.state, places)
        except CheckpointError:
            raise
        except Exception as error:  # a pickle can make any object of any other
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    @property
    def iteration(self) -> int | None:
        """Iterations trained. None: the folder's name does not say so."""
        number = self.path.name.removeprefix("iter_")
        return int(number) if number.isdecimal() else None

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / TABLE} is damaged ({reason[:200]}). Copy the checkpoint again, or use "
            "another one."
        )

    def _table(self) -> bytes:
        file = self.path / TABLE
        size = file_status(file, _WAY_OUT).st_size
        if size > _MAX_TABLE_BYTES:
            raise self._damaged(f"it has {size:,} bytes")
        return file.read_bytes()

    def _places(self, storage: Mapping[Any, Any]) -> dict[tuple[str, Shape], tuple[str, int, int]]:
        """Return key and offset of each part -> file and range in the file."""
        places = {}
        for index, info in storage.items():
            at, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
            if at.get("offset") is None:  # an object
                continue
            # Ranges come from a pickle: names, starts and lengths are checked before any byte is
            # read.
            file, start, length = place["relative_path"], place["offset"], place["length"]
            if not isinstance(file, str) or Path(file).name != file or "\\" in file:
                raise self._damaged(f"it names the file {file!r}. Only plain file names are read")
            if place.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.path}: {at['fqn']} is stored with {place['transform_descriptors']}, "
                    "such as compressed. Load it in Megatron, and save it without."
                )
            num_bytes = self._mapped.size(file)
            start, length = _size(start), _size(length)
            if not length:
                raise self._damaged(f"{file} has no bytes of {at['fqn']}")
            if start + length > num_bytes:
                raise CheckpointError(
                    f"{self.path / file} has {num_bytes:,} bytes, and {at['fqn']} ends "
                    f"at byte {start + length:,}. Copy the checkpoint again."
                )
            places[at["fqn"], _shape(at["offset"])] = (file, start, start + length)
        return places

    def _tensor(
        self,
        key: str,
        entry: Mapping[str, Any],
        places: Mapping[tuple[str, Shape], tuple[str, int, int]],
    ) -> Lazy:
        shape, dtype = _shape(entry["size"]), _dtype(entry["properties"])
        parts = []
        for chunk in entry["chunks"]:
            fields = _fields(chunk, "ChunkStorageMetadata")
            box = Box(_shape(fields["offsets"]), _shape(fields["sizes"]))
            if (key, box.offset) not in places:
                raise self._damaged(f"{key} has no file for the part at {box.offset}")
            parts.append(Part(box, *places[key, box.offset]))
        if not _tile([part.box for part in parts], shape):
            raise self._damaged(f"the parts of {key} overlap or leave gaps in {list(shape)}")
        return Lazy(shape, dtype, partial(self._fill, key, dtype, parts))

    def _fill(
        self, key: str, dtype: torch.dtype, parts: Sequence[Part], box: Box, out: Tensor
    ) -> None:
        for part in parts:
            common = part.box.overlap(box)
            if common is None or out.is_meta or not out.numel():
                continue
            archive = memoryview(self._mapped.map(part.file))[part.start : part.stop]
            try:
                values = read_archive(archive, part.box.shape, dtype)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path / part.file} is damaged at byte {part.start:,}, where {key} is "
                    f"({error}). Copy the checkpoint again, or use another one."
                ) from error
            out[common.relative_to(box.offset).slices] = values[
                common.relative_to(part.box.offset).slices
            ]


# ------------------------------------------------------------------------------------------ format


def _iteration_of(path: Path) -> Path:
    """Return the checkpoint that a tracker file names, or the folder itself."""
    if not path.is_dir():
        raise MissingCheckpointError.at(path)
    path = _inside_nemo(path)
    tracker = path / TRACKER
    if (path / ABOUT).exists() or (path / TABLE).exists() or not tracker.exists():
        return path
    file_status(tracker, _WAY_OUT)
    with tracker.open("rb") as stream:
        text = stream.read(64).decode("utf-8", "replace").strip()
    if text != "release" and not (text.isascii() and text.isdecimal()):
        raise CheckpointError(
            f"{tracker} says {text!r}, which is no iteration. Name the folder of an iteration, "
            "such as iter_0001000."
        )
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise MissingCheckpointError(
            f"{tracker} names {folder}, which is missing. Name the folder of an iteration."
        )
    return folder


def _check_format(path: Path) -> None:
    """Check that a checkpoint has the format ``torch_dist``.

    Raises:
        CheckpointError: Naming the format, and the way out.
    """
    way_out = (
        "Write it as torch_dist in Megatron-LM: tools/checkpoint/convert.py, or training with "
        "--load, --ckpt-convert-format torch_dist and --ckpt-convert-save."
    )
    if _is_legacy(path):
        raise CheckpointError(
            f"{path} is a checkpoint of single ranks (mp_rank_*/model_optim_rng.pt), whose pickles "
            f"run code. {way_out}"
        )
    if not (path / ABOUT).exists():
        raise CheckpointError(
            f"{path} has no {ABOUT}, so it is no torch_dist checkpoint of Megatron-Core, or its "
            f"save was not finished. {way_out}"
        )
    try:
        file_status(path / ABOUT, _WAY_OUT)
        with (path / ABOUT).open("rb") as stream:
            about = json.loads(stream.read(_MAX_TEXT_BYTES))
        backend, version = about["sharded_backend"], about.get("sharded_backend_version", 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path / ABOUT} is damaged ({error!r}). Copy the checkpoint again."
        ) from error
    if backend != _FORMAT or version != 1:
        raise CheckpointError(
            f"{path / ABOUT} says that the format is {backend!r} {version}, and {_FORMAT!r} 1 is "
            f"read. {way_out}"
        )


# ------------------------------------------------------------------------------------------- table


def _is(value: object, name: str) -> bool:
    return isinstance(value, Record) and value.name == name


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not _is(value, name) or not isinstance(value.state, Mapping):
        raise ValueError(f"{type(value).__name__} in the place of {name}")
    fields: Mapping[str, Any] = value.state
    return fields


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _shape(value: Any) -> Shape:
    if _is(value, "Size"):
        (value,) = value.arguments
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{value!r} is no shape")
    return tuple(map(_size, value))


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state
    # A dataclass with __getstate__ is pickled as a tuple, led by the dtype.
    dtype = state["dtype"] if isinstance(state, Mapping) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    return dtype


def _tile(boxes: Sequence[Box], shape: Shape) -> bool:
    """Return whether boxes fill a tensor, each element once."""
    dims = {len(sizes) for box in boxes for sizes in (box.offset, box.shape)}
    return dims <= {len(shape)} and (not prod(shape) or _tile_from(boxes, shape, 0))


def _tile_from(boxes: Sequence[Box], shape: Shape, dim: int) -> bool:
    """Return whether boxes fill the dims from ``dim`` on. Boxes lie in slices of a dim, and each
    slice is filled in the next dims.
    """
    if dim == len(shape):
        return len(boxes) == 1
    end = 0
    for (start, length), boxes_inside in _slices(boxes, dim):
        if start != end or not length or not _tile_from(boxes_inside, shape, dim + 1):
            return False
        end = start + length
    return end == shape[dim]


def _slices(boxes: Sequence[Box], dim: int) -> Iterator[tuple[tuple[int, int], list[Box]]]:
    def interval(box: Box) -> tuple[int, int]:
        return box.offset[dim], box.shape[dim]

    for key, boxes_of_slice in groupby(sorted(boxes, key=interval), key=interval):
        yield key, list(boxes_of_slice)
