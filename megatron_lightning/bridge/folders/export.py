"""Write Hugging Face folders: tensor by tensor, with the files, names and dtypes of the model's
original folder.

A folder appears in a single rename: files are written and flushed beside the target. An export
killed before the rename leaves the old folder, or none. A file with unchanged dtypes keeps the
header of the source file, so that an untrained model gives equal bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.bridge.folders.configuration import add_rope_schema
from megatron_lightning.bridge.folders.file_writer import Chunk, FileWriter
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.new_files import header_of
from megatron_lightning.bridge.folders.safetensors_file import Header
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.agreement import on_first_rank, together
from megatron_lightning.checkpoint.format.files import (
    beside,
    exchange,
    make_locked,
    new_identifier,
    release,
    sync_directory,
    write_file,
)
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.streaming import slabs
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.checkpoint.writing.commit import remove_abandoned
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import CONFIG, PICKLED_INDEX, WEIGHTS, WEIGHTS_INDEX
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup

_CHUNK_BYTES = 64 << 20  # largest box in memory


def write_folder(
    target: Path,
    like: FolderTensors,
    tensors: Mapping[str, Lazy],
    *,
    overwrite: bool = False,
    files: Mapping[str, bytes | None] | None = None,
    group: AxisGroup = ALONE,
    reads_together: torch.device | None = None,
    advance: Advance = silent,
) -> None:
    """Write a folder with the files of another folder and new values.

    All ranks of ``group`` call this. A rank writes every ``group.size``-th file.

    Args:
        target: The folder, on a file system shared by all ranks.
        like: Folder with the target's files, header texts and other content (configuration,
            tokenizer, licences).
        tensors: Name -> tensor, for every tensor of ``like``, in equal shapes.
        overwrite: Whether an existing target is replaced. False: an existing target is refused.
        files: Further files by name. They replace the folder's files of equal names. A file
            without content (None) is left out. None: no further files.
        group: Ranks writing together.
        reads_together: Device of the boxes if reading a box is a collective: all ranks then read
            all tensors in the same order. None: a rank reads only for the files written by this
            rank.
        advance: Called with the number of written bytes.

    Raises:
        CheckpointError: On every rank: if the target exists, a tensor has no file, or a rank
            failed.
    """
    _check_complete(target, like, tensors)
    headers = _headers(like, tensors)
    contents = {**like.files.contents, **(files or {})}
    others = {name: content for name, content in contents.items() if content is not None}
    locks: list[int] = []  # on the first rank
    pending = beside(target, f".tmp-{on_first_rank(group, new_identifier)}")
    try:
        on_first_rank(group, lambda: begin_folder(target, pending, overwrite, locks))
        on_first_rank(group, lambda: _write_others(pending, _with_index(others, headers)))
        on_first_rank(group, lambda: _follow_dtype(pending / CONFIG, like, tensors))
        weights = {
            file: _content(header, tensors, advance, reads_together)
            for file, header in headers.items()
        }
        together(
            group, f"writing {target}", lambda: _write(pending, weights, group, reads_together)
        )
        on_first_rank(group, lambda: finish_folder(pending, target))
    finally:
        for descriptor in locks:
            release(descriptor)
            shutil.rmtree(pending, ignore_errors=True)  # the old folder, or an unfinished folder


def begin_folder(target: Path, pending: Path, overwrite: bool, locks: list[int]) -> None:
    """Make the pending folder. The lock tells a later save that the folder is in use.

    Raises:
        CheckpointError: If the target exists.
    """
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists. Name another folder, or replace this one with --overwrite."
        )
    pending.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(pending.parent)
    locks.append(make_locked(pending))


def _write_others(pending: Path, files: Mapping[str, bytes]) -> None:
    """Write all files without tensors."""
    for name, content in files.items():
        (pending / name).parent.mkdir(exist_ok=True)
        write_file(pending / name, [content])


def _check_complete(target: Path, like: FolderTensors, tensors: Mapping[str, Lazy]) -> None:
    """Check that the files to be written have every tensor, and no other.

    Raises:
        CheckpointError: Naming a tensor without a file, or without values.
    """
    in_files = {stored.name for header in like.headers.values() for stored in header.tensors}
    differing = sorted(in_files ^ tensors.keys())
    if differing or not tensors:
        example = f", such as {differing[0]}" if differing else ""
        raise CheckpointError(
            f"{target}: the model has {len(tensors):,} tensors, and the files that would be "
            f"written as those of {like.path} have {len(in_files):,}; {len(differing):,} differ"
            f"{example}. Nothing was written. Name a folder that transformers has saved with this "
            "model's tensors: --like FOLDER."
        )


def _with_index(files: Mapping[str, bytes], headers: Mapping[str, Header]) -> dict[str, bytes]:
    """Return the files with the index of the weight files. A source's index may name other files,
    or none may be there.
    """
    contents = {name: x for name, x in files.items() if name not in (WEIGHTS_INDEX, PICKLED_INDEX)}
    table = {stored.name: file for file, h in headers.items() for stored in h.tensors}
    if set(headers) == {WEIGHTS}:
        return contents
    index = files.get(WEIGHTS_INDEX)
    if index is None or json.loads(index)["weight_map"] != table:
        size = sum(t.stop - t.start for header in headers.values() for t in header.tensors)
        entries = {"metadata": {"total_size": size}, "weight_map": table}
        index = json.dumps(entries, indent=2, sort_keys=True).encode() + b"\n"
    return {**contents, WEIGHTS_INDEX: index}


def _write(
    pending: Path,
    files: Mapping[str, Iterator[bytes | Tensor]],
    group: AxisGroup,
    reads_together: torch.device | None,
) -> None:
    """Write this rank's files."""
    # Each rank writes whole files. Values of a file that ranks gather together must be read in the
    # same order by all.
    mine = [file for number, file in enumerate(files) if number % group.size == group.rank]
    if reads_together is None:
        for file in mine:
            write_file(pending / file, map(_memory, files[file]))
        return
    writers: dict[str, FileWriter] = {}
    try:
        # Files of different ranks in turns, so that all ranks write at the same time.
        for first in range(0, len(files), group.size):
            batch = list(files)[first : first + group.size]
            writers |= {file: FileWriter(pending / file) for file in batch if file in mine}
            for values in zip_longest(*(files[file] for file in batch)):
                for file, chunk in zip(batch, values, strict=True):
                    if file in writers and chunk is not None:
                        writers[file].put(_memory(chunk))
            for file in batch:
                if file in writers:
                    writers[file].end()
    finally:
        for writer in writers.values():
            writer.end()
    for writer in writers.values():
        writer.check()


def _memory(chunk: bytes | Tensor) -> Chunk:
    """Return the bytes of a chunk, on the host."""
    if isinstance(chunk, bytes):
        return chunk
    memory: Chunk = chunk.reshape(-1).view(torch.uint8).cpu().numpy().data
    return memory


def finish_folder(pending: Path, target: Path) -> None:
    """Give a complete pending folder the target's name."""
    sync_directory(pending)
    _commit(pending, target)


def _follow_dtype(config: Path, like: FolderTensors, tensors: Mapping[str, Lazy]) -> None:
    """Set the dtype in config.json if the tensors have another dtype than the folder."""
    changed = {x.dtype for name, x in tensors.items() if x.dtype != like.tensors[name].dtype}
    if not changed or not config.exists():
        return
    (dtype,) = changed
    name = str(dtype).removeprefix("torch.")
    # Keys of transformers 5, and of earlier versions.
    _edit(config, dict.fromkeys(("dtype", "torch_dtype"), name))
    num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    index = config.with_name(WEIGHTS_INDEX)
    if index.exists():
        _edit(index, {"total_size": num_bytes}, "metadata")


def _edit(path: Path, values: Mapping[str, object], group: str | None = None) -> None:
    """Replace existing entries of a JSON file."""
    plain = json.loads(path.read_bytes())
    entries = plain if group is None else plain.get(group, {})
    entries.update({key: value for key, value in values.items() if key in entries})
    if path.name == CONFIG:
        add_rope_schema(plain)
    path.unlink()
    write_file(path, [json.dumps(plain, indent=2, sort_keys=True).encode() + b"\n"])


def _headers(like: FolderTensors, tensors: Mapping[str, Lazy]) -> dict[str, Header]:
    """Return the headers of the files. A file with unchanged dtypes keeps the header of
    ``like``.
    """
    headers = {}
    for file, header in like.headers.items():
        infos = {
            t.name: TensorInfo(tuple(tensors[t.name].shape), tensors[t.name].dtype)
            for t in header.tensors
        }
        is_equal = all(infos[t.name].dtype == t.dtype for t in header.tensors)
        headers[file] = header if is_equal else header_of(infos)
    return headers


def _content(
    header: Header,
    tensors: Mapping[str, Lazy],
    advance: Advance,
    device: torch.device | None,
) -> Iterator[bytes | Tensor]:
    """Yield the bytes of a file, and values on the device."""
    yield header.text
    for stored in header.tensors:
        tensor = tensors[stored.name]
        for box in slabs(TensorInfo(tuple(tensor.shape), tensor.dtype), _CHUNK_BYTES):
            values = torch.empty(box.shape, dtype=tensor.dtype, device=device)
            tensor.fill(box, values)
            advance(values.nbytes)
            yield values


def _commit(pending: Path, target: Path) -> None:
    """Give a finished folder the target's name. An existing folder gets the name of the unfinished
    folder.
    """
    if not target.exists():
        os.rename(pending, target)
    elif not exchange(pending, target):  # no such call on this system: two renames
        aside = beside(target, f".old-{new_identifier()}")
        os.rename(target, aside)
        os.rename(pending, target)
        shutil.rmtree(aside)
    sync_directory(target.parent)
