"""Write Hugging Face folders: tensor by tensor, with the files, names and dtypes of the folder that
a model came from.

A folder appears in one rename: files are written and flushed beside the target. Killed before the
rename, an export leaves the old folder, or none. A file whose tensors have their dtypes keeps the
header of its source, so that an untrained model gives equal bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.bridge.folder import INDEX, FolderTensors
from megatron_lightning.bridge.lazy import Fill, Lazy
from megatron_lightning.bridge.safetensors_file import Header
from megatron_lightning.checkpoint.format.files import (
    beside,
    exchange,
    new_identifier,
    sync_directory,
    write_file,
)
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.shard_file import header_bytes, header_entry
from megatron_lightning.checkpoint.format.streaming import slabs
from megatron_lightning.checkpoint.source import CheckpointSource
from megatron_lightning.checkpoint.tools.progress import Advance, silent
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.spec import Box, Shard

_PART_BYTES = 64 << 20  # largest box in memory
_CONFIG = "config.json"


def write_folder(
    target: Path,
    like: FolderTensors,
    tensors: Mapping[str, Lazy],
    *,
    overwrite: bool = False,
    advance: Advance = silent,
) -> None:
    """Write a folder with the files of another one and new values.

    Args:
        target: The folder.
        like: The folder whose files, header texts and other content (configuration, tokenizer,
            licences) the target gets.
        tensors: Name -> tensor; as many as ``like`` has, of the same shapes.
        overwrite: Whether an existing target is replaced; refused otherwise.
        advance: Called with the bytes that were written.

    Raises:
        CheckpointError: If the target exists, or ``like`` has no safetensors files.
    """
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists. Name another folder, or replace this one with --overwrite."
        )
    if not like.headers:
        raise CheckpointError(
            f"{like.path} has no safetensors files to follow. Save it as safetensors with "
            "transformers first: model.save_pretrained(folder)."
        )
    pending = beside(target, f".tmp-{new_identifier()}")
    pending.mkdir(parents=True)
    try:
        _copy_others(like, pending)
        _follow_dtype(pending / _CONFIG, like, tensors)
        for file, header in like.headers.items():
            write_file(pending / file, _content(header, tensors, advance))
        sync_directory(pending)
        _commit(pending, target)
    finally:
        shutil.rmtree(pending, ignore_errors=True)  # the old folder, or an unfinished one


def _copy_others(like: FolderTensors, pending: Path) -> None:
    """Write all files but those of the tensors."""
    for name, content in like.files.contents.items():
        (pending / name).parent.mkdir(exist_ok=True)
        write_file(pending / name, [content])


def _follow_dtype(config: Path, like: FolderTensors, tensors: Mapping[str, Lazy]) -> None:
    """Name the dtype of the tensors in config.json, if it is not the folder's."""
    changed = {x.dtype for name, x in tensors.items() if x.dtype != like.tensors[name].dtype}
    if not changed or not config.exists():
        return
    (dtype,) = changed
    name = str(dtype).removeprefix("torch.")
    # Keys of transformers 5, and of earlier versions.
    _edit(config, dict.fromkeys(("dtype", "torch_dtype"), name))
    num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    index = config.with_name(INDEX)
    if index.exists():
        _edit(index, {"total_size": num_bytes}, "metadata")


def _edit(path: Path, values: Mapping[str, object], group: str | None = None) -> None:
    """Replace entries that a JSON file has."""
    plain = json.loads(path.read_bytes())
    entries = plain if group is None else plain.get(group, {})
    entries.update({key: value for key, value in values.items() if key in entries})
    path.unlink()
    write_file(path, [json.dumps(plain, indent=2, sort_keys=True).encode() + b"\n"])


def _content(
    header: Header, tensors: Mapping[str, Lazy], advance: Advance
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file."""
    yield _header_text(header, tensors)
    for stored in header.tensors:
        tensor = tensors[stored.name]
        for box in slabs(TensorInfo(tuple(tensor.shape), tensor.dtype), _PART_BYTES):
            values = tensor.read(box).reshape(-1)
            advance(values.nbytes)
            yield values.view(torch.uint8).numpy().data


def _header_text(header: Header, tensors: Mapping[str, Lazy]) -> bytes:
    if all(tensors[stored.name].dtype == stored.dtype for stored in header.tensors):
        return header.text
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for stored in header.tensors:
        tensor = tensors[stored.name]
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        entries[stored.name] = header_entry(tensor.dtype, tensor.shape, start, end)
    return header_bytes(entries)


def _commit(pending: Path, target: Path) -> None:
    """Give a finished folder its name; an existing folder gets the name of the unfinished one."""
    if not target.exists():
        os.rename(pending, target)
    elif not exchange(pending, target):  # no such call on this system: two renames
        aside = beside(target, f".old-{new_identifier()}")
        os.rename(target, aside)
        os.rename(pending, target)
        shutil.rmtree(aside)
    sync_directory(target.parent)


# --------------------------------------------------------------------------------- where values are


def fills_of_checkpoint(
    source: CheckpointSource, names: Mapping[str, Lazy], model: str | None = None
) -> dict[str, Fill]:
    """Return fills of the parameters in a checkpoint, whose boxes are read when needed.

    Args:
        source: The checkpoint, of any layout.
        names: Parameters by their names in the model. A LightningModule holds the model at any one
            path.
        model: That path; None: it is found by the names.

    Raises:
        CheckpointError: If a parameter is missing, or has another shape.
    """
    stored = source.tensors()
    place = None if model is None else f"state_dict.{model}." if model else "state_dict."
    is_there = place is not None and any(name.startswith(place) for name in stored)
    prefix = place if place and is_there else _prefix(stored, names)
    for name, lazy in names.items():
        if prefix + name not in stored:
            raise CheckpointError(
                f"the checkpoint has no {prefix}{name}, which the folder's model has. Name the "
                "folder that the checkpoint was trained from."
            )
        if tuple(stored[prefix + name].shape) != tuple(lazy.shape):
            raise CheckpointError(
                f"{prefix}{name} has shape {tuple(stored[prefix + name].shape)} in the checkpoint "
                f"and {tuple(lazy.shape)} in the folder's model. Name the folder that the "
                "checkpoint was trained from."
            )

    def fill_of(name: str) -> Fill:
        def fill(box: Box, out: Tensor) -> None:
            if out.numel():
                source.read([(prefix + name, Shard(box.offset, out))])

        return fill

    return {name: fill_of(name) for name in names}


def _prefix(stored: Mapping[str, TensorInfo], names: Mapping[str, Lazy]) -> str:
    """Return what stands before the names of the model in a checkpoint."""
    first = next(iter(names))
    found = [
        name.removesuffix(first)
        for name in stored
        if name.startswith("state_dict.") and name.endswith(f".{first}")
    ]
    if not found:
        raise CheckpointError(
            f"the checkpoint has no tensor whose name ends with {first}, so it holds no model of "
            "the folder's class. Name the folder that the checkpoint was trained from."
        )
    return min(found, key=len)
