"""Convert a sharded checkpoint to a single plain file, in a single process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import torch

from megatron_lightning.checkpoint.entries import place, read_table
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.naming import (
    FULL_STATE,
    OWN,
    join_tensors,
    number_optimizer_state,
)
from megatron_lightning.checkpoint.format.shard_file import header_bytes, header_entry
from megatron_lightning.checkpoint.format.storage import completed_file, is_remote, local_path
from megatron_lightning.checkpoint.format.streaming import CHUNK_BYTES, read_box, slabs
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.spec import Box, Shard

PlainFormat = Literal["lightning", "state_dict", "safetensors"]
_MODULE = "state_dict."


def read_full(
    path: str | os.PathLike[str], *, weights_only: bool = False, advance: Advance = silent
) -> dict[str, Any]:
    """Read a full checkpoint into Lightning's nested dict.

    Args:
        path: A checkpoint directory of any layout.
        weights_only: Leave out optimizers, schedulers and callbacks, like
            ``ModelCheckpoint(save_weights_only=True)``.
        advance: Progress.

    Returns:
        ``state_dict`` of full tensors, ``optimizer_states`` in torch's own form, loops, callbacks
        and the rest. All on the CPU.
    """
    source = open_checkpoint(path)
    left_out = FULL_STATE if weights_only else ()
    stored = {
        name: info
        for name, info in source.tensors().items()
        if name.partition(".")[0] not in left_out
    }
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in stored.items()}
    for name, tensor in tensors.items():
        if tensor.numel():
            source.read([(name, Shard((0,) * tensor.dim(), tensor))])
            advance(tensor.nbytes)
    state = {key: value for key, value in source.state().items() if key not in left_out}
    # Tensors of callbacks go back to their places in the nested state, and not under names.
    entries = [e for e in read_table(state) or () if e.stored in tensors]
    stored_tensors = [tensors[entry.stored] for entry in entries]
    for entry in entries:
        tensors.pop(entry.stored, None)
    checkpoint = join_tensors(tensors, state)
    place(checkpoint, entries, stored_tensors)
    for copy, owner in _tied(source).items():  # stored once, under the owner's name
        for values in checkpoint.values():
            if isinstance(values, dict) and isinstance(values.get(owner), torch.Tensor):
                values.setdefault(copy, values[owner])
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            number_optimizer_state(entry) for entry in checkpoint["optimizer_states"]
        ]
    return checkpoint


def plain_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return a checkpoint directory as an open file for ``MyModule.load_from_checkpoint``, a reader
    of files only.

    The file contains the result of :func:`read_full` with ``weights_only=True``. The file is
    temporary, on disk until closed.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    torch.save(read_full(path, weights_only=True), file)
    file.seek(0)
    return file


def consolidate(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: PlainFormat = "lightning",
    advance: Advance = silent,
) -> None:
    """Write a checkpoint directory as a single plain file with the module's names. The file appears
    only when complete. For the arguments see ``commands.consolidate``.
    """
    if not is_remote(output) and local_path(output).is_dir():
        raise ConfigError(f"{output} is a directory; the output is one file. Name another target.")
    if format == "lightning":
        _save(read_full(path, advance=advance), output)
        return
    source = open_checkpoint(path)
    names = _module_names(source)
    if format == "safetensors":
        _write_safetensors(source, names, output, advance)
    else:
        stored = source.tensors()
        tensors = {
            name: read_box(source, key, stored[key].dtype, Box.full(stored[key].shape))
            for name, key in names.items()
        }
        advance(sum(tensor.nbytes for tensor in tensors.values()))
        _save(tensors, output)


def format_of(output: str | os.PathLike[str]) -> PlainFormat:
    """Return the format of a file name."""
    by_suffix: Mapping[str, PlainFormat] = {
        ".safetensors": "safetensors",
        ".pt": "state_dict",
        ".pth": "state_dict",
    }
    return by_suffix.get(Path(output).suffix, "lightning")


def num_bytes(path: str | os.PathLike[str], format: PlainFormat) -> int:
    """Return how many bytes :func:`consolidate` reads for a format."""
    source = open_checkpoint(path)
    tensors = source.tensors()
    names = tensors if format == "lightning" else _module_names(source).values()
    return sum(tensors[name].num_bytes() for name in names)


def _tied(source: CheckpointSource) -> dict[str, str]:
    tied: dict[str, str] = source.state().get(OWN, {}).get("tied", {})
    return tied


def _module_names(source: CheckpointSource) -> dict[str, str]:
    """Return name in the module -> name in the checkpoint. Tied copies map to the owner's name in
    the checkpoint.
    """
    stored = source.tensors()
    names = {name.removeprefix(_MODULE): name for name in stored if name.startswith(_MODULE)}
    copies = {copy: names[owner] for copy, owner in _tied(source).items() if owner in names}
    return {**copies, **names}


def _save(value: Mapping[str, Any], output: str | os.PathLike[str]) -> None:
    with completed_file(output) as file:
        torch.save(value, file)


def _write_safetensors(
    source: CheckpointSource,
    names: Mapping[str, str],
    output: str | os.PathLike[str],
    advance: Advance,
) -> None:
    stored = source.tensors()
    # Wide dtypes first keeps every tensor aligned for readers with a memory map.
    ordered = sorted(names, key=lambda name: -stored[names[name]].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in ordered:
        info = stored[names[name]]
        end = position + info.num_bytes()
        header[name] = header_entry(info.dtype, info.shape, position, end)
        position = end
    with completed_file(output) as file:
        file.write(header_bytes(header))
        for name in ordered:
            for chunk in _bytes(source, names[name], stored[names[name]], advance):
                file.write(chunk)


def _bytes(
    source: CheckpointSource, name: str, info: TensorInfo, advance: Advance
) -> Iterator[memoryview]:
    for box in slabs(info, CHUNK_BYTES):
        values = read_box(source, name, info.dtype, box)
        advance(values.nbytes)
        yield values.reshape(-1).view(torch.uint8).numpy().data
