"""Sources of a checkpoint's tensors: a sharded directory, or a plain Lightning ``.ckpt`` file,
behind a common interface.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch

from megatron_lightning.checkpoint.agreement import on_first_rank, together
from megatron_lightning.checkpoint.format.manifest import Manifest, TensorInfo
from megatron_lightning.checkpoint.format.naming import name_optimizer_state, split_tensors
from megatron_lightning.checkpoint.format.plain_state import load_plain_file, load_state
from megatron_lightning.checkpoint.format.shard_file import (
    RangeRead,
    ReadQueue,
    check_dtypes,
    plan_reads,
)
from megatron_lightning.checkpoint.format.storage import (
    Folder,
    folder_of,
    is_plain_file,
    is_remote,
    local_path,
    opened,
    read_range,
    unreadable,
    wrong_size,
)
from megatron_lightning.checkpoint.format.structure import check_structure
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import ADAPTER_CONFIG, CONFIG, MANIFEST
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.shards.spec import Shard

_MISSING = (b"", b"")
_READ_THREADS = 4
_MAX_MANIFEST_BYTES = 1 << 30  # the manifest of 16,384 ranks has less than a fifth
_OPEN_FILES = 64


class CheckpointSource(Protocol):
    """A checkpoint to read from."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by global name (for names see ``naming``), in the same order on all
        ranks.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return a fresh copy of everything else. Optimizer states are in the named form."""
        ...

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """Fill (tensor name, shard) with the checkpoint's values. The tensors exist and enclose the
        shards.
        """
        ...


class DirectorySource:
    """A sharded checkpoint."""

    def __init__(self, folder: Folder, manifest: Manifest, state: bytes, *, alone: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self._state = state
        self._alone = alone

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        return self.manifest.tensors

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`."""
        origin = f"{self.folder}/{self.manifest.state_file}"
        state = load_state(self._state, origin)
        check_structure(state, origin)
        return state

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """See :class:`CheckpointSource`. Reads only the byte ranges of the shards."""
        by_file: dict[str, list[RangeRead]] = {}
        dtypes: dict[str, dict[int, tuple[str, torch.dtype]]] = {}
        for name, shard in shards:
            info = self.manifest.tensors[name]
            for stored in info.shards:
                common = stored.box.overlap(shard.box)
                if common is not None:
                    target = shard.data[common.relative_to(shard.offset).slices]
                    overlap = common.relative_to(stored.box.offset)
                    by_file.setdefault(stored.file, []).extend(
                        plan_reads(stored, overlap.offset, target, info.dtype)
                    )
                    dtypes.setdefault(stored.file, {})[stored.start] = name, info.dtype
        files = list(by_file)
        with ThreadPoolExecutor(_READ_THREADS, "checkpoint-read") as threads:
            for first in range(0, len(files), _OPEN_FILES):
                self._read_files(
                    {file: by_file[file] for file in files[first : first + _OPEN_FILES]},
                    dtypes,
                    threads,
                )

    def _read_files(
        self,
        reads: Mapping[str, Sequence[RangeRead]],
        dtypes: Mapping[str, Mapping[int, tuple[str, torch.dtype]]],
        threads: ThreadPoolExecutor,
    ) -> None:
        """Read from several files at once. Two threads share a file if there are fewer files than
        threads.
        """
        with ExitStack() as stack:
            streams: list[ReadQueue] = []
            checks: list[Callable[[], None]] = []
            for file, boxes in reads.items():
                reader = stack.enter_context(
                    opened(self.folder, file, self.manifest.files[file], once=self._alone)
                )
                checks.append(partial(check_dtypes, reader, dtypes[file], f"{self.folder}/{file}"))
                # Disks read ahead: ascending positions, interleaved over the streams of a file.
                ordered = sorted(boxes, key=lambda read: read.shard.start + read.start)
                parts = (
                    ordered[first :: reader.num_streams] for first in range(reader.num_streams)
                )
                streams += [ReadQueue(reader, part, f"{self.folder}/{file}") for part in parts]
            work = [stream.work for _ in range(2) for stream in streams]
            # Headers are checked beside the reads, and the first failure stops all.
            pending = [threads.submit(task) for task in (*checks, *work)]
            try:
                wait(pending, return_when=FIRST_EXCEPTION)
            finally:  # before the files are closed
                for stream in streams:
                    stream.stop()
                wait(pending)
            for future in pending:
                future.result()


class PlainSource:
    """A plain Lightning checkpoint file, memory-mapped.

    Args:
        path: The file.
        optimizer_parameters: For each optimizer the names of the optimizer's parameters, in the
            order of the concatenated parameter groups on one device. Without names only the number
            of optimizers is known.

    Raises:
        CheckpointError: If the file cannot be read as plain data, or the saved optimizers have
            other parameters.
    """

    def __init__(self, path: str, optimizer_parameters: Sequence[Sequence[str]] = ()) -> None:
        checkpoint = load_plain_file(path)
        check_structure(checkpoint, path)
        optimizers = checkpoint.pop("optimizer_states", None)
        if optimizer_parameters:
            optimizers = optimizers or []
            if len(optimizers) != len(optimizer_parameters):
                raise CheckpointError(
                    f"{path} holds the states of {len(optimizers)} optimizers, and the model has "
                    f"{len(optimizer_parameters)}. Return as many from configure_optimizers, or "
                    "load the weights alone."
                )
            pairs = zip(optimizers, optimizer_parameters, strict=True)
            # torch numbers parameters in the order of the groups. Names make states independent of
            # the order.
            checkpoint["optimizer_states"] = [
                name_optimizer_state(entry, names) for entry, names in pairs
            ]
        elif optimizers is not None:
            checkpoint["optimizer_states"] = [{"state": {}, "param_groups": []} for _ in optimizers]
        self._tensors, self._state = split_tensors(checkpoint)
        for name, tensor in self._tensors.items():
            if tensor.layout != torch.strided or tensor.is_meta:
                kind = (
                    "without values (meta)"
                    if tensor.is_meta
                    else str(tensor.layout).removeprefix("torch.")
                )
                raise CheckpointError(
                    f"{path}: {name} is {kind}, and only dense tensors can be read. Save it as a "
                    "dense one."
                )

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        return {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype)
            for name, tensor in self._tensors.items()
        }

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`. Tensors in the state are memory-mapped."""
        return dict(self._state)

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """See :class:`CheckpointSource`."""
        for name, shard in shards:
            shard.data.copy_(self._tensors[name][shard.box.slices])


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    optimizer_parameters: Sequence[Sequence[str]] = (),
    group: AxisGroup = ALONE,
) -> CheckpointSource:
    """Open a checkpoint directory or a plain Lightning ``.ckpt`` file. No tensor is read yet.

    The first rank looks at ``path``, and reads manifest and state for all ranks: ranks cannot
    differ.

    Args:
        path: Directory or file.
        optimizer_parameters: For a plain file: see :class:`PlainSource`.
        group: The calling ranks.

    Raises:
        MissingCheckpointError: On every rank, if nothing is at ``path``.
        CheckpointError: On every rank, if the checkpoint is incomplete or cannot be read safely.
    """
    parsed: list[Manifest] = []  # on the first rank
    content = on_first_rank(group, lambda: _read_directory(path, parsed))
    if content == _MISSING:
        raise MissingCheckpointError.at(path)

    def build() -> CheckpointSource:
        if content is None:
            return PlainSource(str(path), optimizer_parameters)
        manifest = parsed[0] if parsed else Manifest.loads(content[0])
        return DirectorySource(folder_of(path), manifest, content[1], alone=group.size == 1)

    return together(group, f"opening {path}", build)


def _no_manifest(path: str | os.PathLike[str], names: Collection[str]) -> CheckpointError:
    """Return the error of a folder that is no complete checkpoint."""
    for file, kind, command in (
        (ADAPTER_CONFIG, "a folder of peft", "adapters import"),
        (CONFIG, "a Hugging Face folder", "convert import"),
    ):
        if file in names:
            return CheckpointError(
                f"{path} is {kind} (it has {file}), and no checkpoint of this package. Name a "
                f"checkpoint, or make one by `megatron-lightning {command}`."
            )
    return CheckpointError(
        f"{path} has no {MANIFEST}: its save was never completed, or it is not a checkpoint of "
        "this package. Resume from another checkpoint."
    )


def _read_directory(
    path: str | os.PathLike[str], parsed: list[Manifest]
) -> tuple[bytes, bytes] | None:
    """Return manifest and state of a directory, None for a plain file, ``_MISSING`` for nothing.
    Append the parsed manifest to ``parsed``.
    """
    if is_plain_file(path):
        return None
    folder = folder_of(path)
    sizes = folder.sizes()
    if not sizes and (is_remote(path) or not local_path(path).exists()):
        return _MISSING
    if MANIFEST not in sizes:
        raise _no_manifest(path, sizes)
    text = manifest_text(folder, sizes[MANIFEST])
    try:
        manifest = Manifest.loads(text)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    # Ranks get the text, and the reading rank need not parse it twice.
    parsed.append(manifest)
    for name, size_bytes in manifest.files.items():  # before anything is changed
        if name not in sizes:
            raise unreadable(f"{path}/{name}", "no such file; links are not followed")
        if sizes[name] != size_bytes:
            raise wrong_size(f"{path}/{name}", sizes[name], size_bytes)
    # The checksum comes before the state is unpacked.
    with opened(folder, manifest.state_file, manifest.files[manifest.state_file]) as reader:
        state = bytes(read_range(reader, 0, manifest.files[manifest.state_file]))
    if zlib.crc32(state) != manifest.state_checksum:
        raise CheckpointError(
            f"{path}/{manifest.state_file} is damaged: its checksum differs. Resume from another "
            "checkpoint."
        )
    return text, state


def manifest_text(folder: Folder, size_bytes: int) -> bytes:
    """Return the content of a folder's manifest."""
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{folder}/{MANIFEST} has {size_bytes} bytes, more than {_MAX_MANIFEST_BYTES}: it is "
            "no manifest. Resume from another checkpoint."
        )
    with opened(folder, MANIFEST, size_bytes) as reader:
        return bytes(read_range(reader, 0, size_bytes))
