"""From a sharded checkpoint to one plain file, in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import torch

from megatron_lightning.checkpoint.naming import FULL_STATE, OWN, join_tensors, number_optimizer_state
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.shard_file import Piece, header_bytes, header_entry
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo, open_checkpoint
from megatron_lightning.checkpoint.storage import completed_file, is_remote, local_path
from megatron_lightning.checkpoint.streaming import PART_BYTES, read_box, slabs
from megatron_lightning.errors import ConfigError

PlainFormat = Literal["lightning", "state_dict", "safetensors"]
_MODULE = "state_dict."


def read_full(path: str | os.PathLike[str], *, weights_only: bool = False, advance: Advance = silent) -> dict[str, Any]:
    """Read a whole checkpoint into the nested dict that Lightning knows.

    Args:
        path: A checkpoint directory, whatever the layout it was saved under.
        weights_only: Leave out what ``ModelCheckpoint(save_weights_only=True)`` leaves out: optimizers, schedulers, callbacks.
        advance: Progress.

    Returns:
        ``state_dict`` of full tensors, ``optimizer_states`` in torch's own form, loops, callbacks and the rest; all on the CPU.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged.
    """
    source = open_checkpoint(path)
    left_out = FULL_STATE if weights_only else ()
    stored = {name: info for name, info in source.tensors().items() if name.partition(".")[0] not in left_out}
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in stored.items()}
    for name, tensor in tensors.items():
        if tensor.numel():
            source.read([Piece(name, (0,) * tensor.dim(), tensor)])
            advance(tensor.nbytes)
    checkpoint = join_tensors(tensors, {key: value for key, value in source.state().items() if key not in left_out})
    for copy, owner in _tied(source).items():  # stored once, under the owner's name
        for values in checkpoint.values():
            if isinstance(values, dict) and isinstance(values.get(owner), torch.Tensor):
                values.setdefault(copy, values[owner])
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [number_optimizer_state(entry) for entry in checkpoint["optimizer_states"]]
    return checkpoint


def plain_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return a checkpoint as an open file for ``MyModule.load_from_checkpoint``, which reads files and no directories.

    It holds what :func:`read_full` returns with ``weights_only=True``; on disk, in the folder of temporary files, until it is
    closed.

    Args:
        path: A checkpoint directory, whatever the layout it was saved under.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged.
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
    """Write a checkpoint directory as one plain file under the module's own names.

    The file appears under its name only when it is complete.

    Args:
        path: The checkpoint directory.
        output: The file to write, a path or URL; an existing one is replaced.
        format: ``"lightning"``: a ``.ckpt`` that ``load_from_checkpoint`` and a plain Trainer read. ``"state_dict"``: the
            module's tensors in ``torch.save``'s form. ``"safetensors"``: the same as a safetensors file; a part of 64 MiB
            is held in memory, whatever the model's size. The other two need memory for all that they write.
        advance: Progress, in bytes read.

    Raises:
        ConfigError: If the output is a directory.
        CheckpointError: If the checkpoint is incomplete or damaged.
    """
    if not is_remote(output) and local_path(output).is_dir():
        raise ConfigError(f"{output} is a directory, and one plain file is to be written. Name another target.")
    if format == "lightning":
        _save(read_full(path, advance=advance), output)
        return
    source = open_checkpoint(path)
    names = _module_names(source)
    if format == "safetensors":
        _write_safetensors(source, names, output, advance)
    else:
        stored = source.tensors()
        _save({name: _read(source, full, stored[full], advance) for name, full in names.items()}, output)


def format_of(output: str | os.PathLike[str]) -> PlainFormat:
    """Return the format that a file name stands for."""
    by_suffix: Mapping[str, PlainFormat] = {".safetensors": "safetensors", ".pt": "state_dict", ".pth": "state_dict"}
    return by_suffix.get(Path(output).suffix, "lightning")


def num_bytes(path: str | os.PathLike[str], format: PlainFormat) -> int:
    """Return how many bytes :func:`consolidate` reads for a format."""
    source = open_checkpoint(path)
    tensors = source.tensors()
    names = tensors if format == "lightning" else _module_names(source).values()
    return sum(prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names)


def _tied(source: CheckpointSource) -> dict[str, str]:
    tied: dict[str, str] = source.state().get(OWN, {}).get("tied", {})
    return tied


def _module_names(source: CheckpointSource) -> dict[str, str]:
    """Return name in the module -> name in the checkpoint; tied copies have their owner's."""
    stored = source.tensors()
    names = {name.removeprefix(_MODULE): name for name in stored if name.startswith(_MODULE)}
    copies = {copy: names[owner] for copy, owner in _tied(source).items() if owner in names}
    return {**copies, **names}


def _read(source: CheckpointSource, name: str, entry: TensorInfo, advance: Advance) -> torch.Tensor:
    tensor = read_box(source, name, entry.dtype, (0,) * len(entry.shape), entry.shape)
    advance(tensor.nbytes)
    return tensor


def _save(value: Mapping[str, Any], output: str | os.PathLike[str]) -> None:
    with completed_file(output) as file:
        torch.save(value, file)


def _write_safetensors(
    source: CheckpointSource, names: Mapping[str, str], output: str | os.PathLike[str], advance: Advance
) -> None:
    stored = source.tensors()
    # Wide dtypes first keeps every tensor aligned for readers that map the file.
    ordered = sorted(names, key=lambda name: -stored[names[name]].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in ordered:
        entry = stored[names[name]]
        end = position + prod(entry.shape) * entry.dtype.itemsize
        header[name] = header_entry(entry.dtype, entry.shape, position, end)
        position = end
    with completed_file(output) as file:
        file.write(header_bytes(header))
        for name in ordered:
            for chunk in _bytes(source, names[name], stored[names[name]], advance):
                file.write(chunk)


def _bytes(source: CheckpointSource, name: str, entry: TensorInfo, advance: Advance) -> Iterator[memoryview]:
    for offset, shape in slabs(entry.shape, max(1, PART_BYTES // entry.dtype.itemsize)):
        part = read_box(source, name, entry.dtype, offset, shape)
        advance(part.nbytes)
        yield part.reshape(-1).view(torch.uint8).numpy().data
