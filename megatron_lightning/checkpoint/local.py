"""Copies of a run's state on each node's own disk, and on a neighbour's: recovery without the shared file system.

Every rank writes all that it holds, as an ordinary checkpoint of its own, and sends it to the rank in its place on the next
node, which keeps it too. A run that starts again under the same layout takes the newest copy of which each rank's part is on
some node: from its own disk, or from the neighbour's if a node was replaced.

    <folder of the node>/step-000000001200-<id>/rank-00003/manifest.json …

A small file on the shared file system, the *pointer*, says where the copies are, so that all ranks know of them, whatever
their own disks hold. The idea follows NVIDIA Resiliency Extension's local checkpointing; a copy cannot be resharded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.checkpoint.agreement import ALONE, all_gather, on_first_rank, together
from megatron_lightning.checkpoint.commit import is_committed, new_identifier
from megatron_lightning.checkpoint.manifest import Shape, dtype_of
from megatron_lightning.checkpoint.saving import save_sharded
from megatron_lightning.checkpoint.shard_file import Piece
from megatron_lightning.checkpoint.sharded import TensorShards
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo, open_checkpoint, overlap, slices
from megatron_lightning.checkpoint.storage import LocalFolder, sync_directory
from megatron_lightning.checkpoint.streaming import completed_file
from megatron_lightning.checkpoint.structure import check_structure
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup

NODE = "{node_rank}"
"""Stands for the node's number in the folder of the copies."""
_FILE_BYTES = 256 << 20  # of which one is in memory while it is sent
_NUM_KEPT = 2  # the newest may be lost while it is written
_NAME = re.compile(r"step-(\d{12})-[0-9a-f]{12}")
_FORMAT = "megatron_lightning local copies"


@dataclass(frozen=True)
class Pointer:
    """What the pointer file says."""

    folder: str
    """Folder on each node; ``{node_rank}`` in it stands for the node's number."""
    ranks_per_node: int
    """Ranks of a node."""
    step: int
    """Step of the newest copy when the file was written."""
    layout: Mapping[str, Any]
    """Layout of the run."""

    def write(self, path: str) -> None:
        """Write the file; it replaces the one before when it is whole."""
        with completed_file(path) as file:
            file.write_text(json.dumps({"format": _FORMAT, **asdict(self)}))

    @classmethod
    def read(cls, path: str) -> Pointer | None:
        """Return what a pointer file says; None for any other file, for a directory and for nothing.

        Raises:
            CheckpointError: If it is one, and does not say what a pointer says.
        """
        file = Path(path)
        if not file.is_file() or file.stat().st_size > 1 << 16:
            return None
        try:
            content = json.loads(file.read_bytes())
        except ValueError:
            return None
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            return None
        kinds = {"folder": str, "ranks_per_node": int, "step": int, "layout": dict}
        if content.keys() != kinds.keys() or not all(isinstance(content[key], kind) for key, kind in kinds.items()):
            raise CheckpointError(f"{path} is a pointer to local copies and is damaged. Delete it and resume from another.")
        return cls(**content)


class LocalCopies:
    """The copies of one run, as one rank sees them.

    Args:
        folder: Folder on each node; ``{node_rank}`` in it stands for the node's number.
        group: All ranks of the job.
        ranks_per_node: Ranks of a node; they are numbered node by node.
    """

    def __init__(self, folder: str, group: AxisGroup, ranks_per_node: int) -> None:
        self._group, self._ranks_per_node = group, ranks_per_node
        self._folder = Path(folder.replace(NODE, str(group.rank // ranks_per_node)))

    def save(self, step: int, tensors: Iterable[TensorShards], state: Mapping[str, Any]) -> None:
        """Write this rank's copy and give one to the next node; all ranks call this.

        Args:
            step: Optimizer steps done.
            tensors: All that this rank holds; ``writes`` does not matter.
            state: Everything else, as the first rank has it.

        Raises:
            CheckpointError: On every rank, if one failed; older copies are intact.
        """
        group = self._group
        name = f"step-{step:012d}-{on_first_rank(group, new_identifier)}"
        together(group, "writing a local copy", lambda: self._write(self._part(name, group.rank), tensors, state))
        self._replicate(name)
        together(group, "deleting old local copies", lambda: self._forget_old(name))

    def open(self) -> CheckpointSource | None:
        """Return the newest copy of which every rank's part is on some node; None if there is none. All ranks call this.

        Raises:
            CheckpointError: On every rank, if a part is damaged.
        """
        group = self._group
        held = all_gather(group, self._held())
        wanted = set(range(group.size))
        names = {name for parts in held for name, _ in parts}
        complete = [name for name in names if {rank for parts in held for n, rank in parts if n == name} >= wanted]
        if not complete:
            return None
        name = max(complete)
        self._fetch(name, [{rank for n, rank in parts if n == name} for parts in held])
        own = together(group, "opening a local copy", lambda: open_checkpoint(self._part(name, group.rank)))
        state = together(group, "opening a local copy", lambda: _contents(own))
        shapes: dict[str, TensorInfo] = {}
        for described in all_gather(group, state["tensors"]):
            shapes.update(described)
        return _LocalSource(own, state["boxes"], shapes, on_first_rank(group, lambda: state["state"]))

    def _part(self, name: str, rank: int) -> Path:
        return self._folder / name / f"rank-{rank:05d}"

    def _write(self, path: Path, tensors: Iterable[TensorShards], state: Mapping[str, Any]) -> None:
        held: list[TensorShards] = []
        boxes: dict[str, list[tuple[str, Shape, Shape]]] = {}
        shapes: dict[str, tuple[Shape, str]] = {}
        for number, shards in enumerate(tensors):
            shapes[shards.name] = (shards.global_shape, str(shards.dtype).removeprefix("torch."))
            for offset, view in shards.pieces:
                stored = f"{number}.{len(held)}"
                held.append(TensorShards.whole(stored, view))
                boxes.setdefault(shards.name, []).append((stored, offset, tuple(view.shape)))
        mine = {"tensors": shapes, "boxes": boxes, "state": state if self._group.rank == 0 else {}}
        save_sharded(path, held, mine, group=ALONE, max_file_bytes=_FILE_BYTES)

    def _held(self) -> set[tuple[str, int]]:
        """Return (copy, rank) of every part on this node."""
        found = set()
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            if _NAME.fullmatch(folder.name):
                parts = [part for part in folder.iterdir() if re.fullmatch(r"rank-\d{5}", part.name) and is_committed(part)]
                found |= {(folder.name, int(part.name[5:])) for part in parts}
        return found

    def _replicate(self, name: str) -> None:
        """Send this rank's part to the next node and receive one from the node before."""
        group, step = self._group, self._ranks_per_node
        to, source = self._next(group.rank), (group.rank - step) % group.size
        if to == group.rank:
            return  # a single node has no neighbour
        if group.rank // step % 2 == 0:  # even nodes send first, odd ones receive first
            self._send(self._part(name, group.rank), to)
            self._receive(self._part(name, source), source)
        else:
            self._receive(self._part(name, source), source)
            self._send(self._part(name, group.rank), to)

    def _fetch(self, name: str, held: Sequence[set[int]]) -> None:
        """Bring each part to its rank's node and to the next one, if it is not there: a new node gets what the old one had."""
        for rank in range(self._group.size):
            holder = next(holder for holder, parts in enumerate(held) if rank in parts)
            for receiver in dict.fromkeys((rank, self._next(rank))):
                if rank not in held[receiver] and self._group.rank == holder:
                    self._send(self._part(name, rank), receiver)
                elif rank not in held[receiver] and self._group.rank == receiver:
                    self._receive(self._part(name, rank), holder)

    def _next(self, rank: int) -> int:
        """Return the rank in the same place on the next node; itself on the only node."""
        alone = self._ranks_per_node >= self._group.size
        return rank if alone else (rank + self._ranks_per_node) % self._group.size

    def _send(self, part: Path, rank: int) -> None:
        names = sorted(os.listdir(part))
        self._send_object(names, rank)
        for name in names:
            self._send_object((part / name).read_bytes(), rank)

    def _receive(self, part: Path, rank: int) -> None:
        temporary = part.with_name(f"{part.name}.tmp-{new_identifier()}")
        temporary.mkdir(parents=True)
        for name in self._receive_object(rank):
            LocalFolder(temporary).write(name, [self._receive_object(rank)])
        sync_directory(temporary)
        os.rename(temporary, part)
        sync_directory(part.parent)

    def _send_object(self, value: Any, rank: int) -> None:
        dist.send_object_list([value], self._group.ranks[rank], self._group.process_group, torch.device("cpu"))

    def _receive_object(self, rank: int) -> Any:
        box = [None]
        dist.recv_object_list(box, self._group.ranks[rank], self._group.process_group, torch.device("cpu"))
        return box[0]

    def _forget_old(self, newest: str) -> None:
        """Keep the copy just written and those before it; later steps are of a run that was given up."""
        if self._group.rank % self._ranks_per_node == 0:
            names = {folder.name for folder in self._folder.iterdir() if _NAME.fullmatch(folder.name)}
            step = newest.rpartition("-")[0]
            before = sorted(name for name in names if name.rpartition("-")[0] < step)
            for name in names - {newest, *before[1 - _NUM_KEPT :]}:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _contents(source: CheckpointSource) -> dict[str, Any]:
    """Return what a rank's part says: its tensors, the boxes it has of them, and on the first rank the rest."""
    state = source.state()
    described = {name: TensorInfo(tuple(shape), dtype_of(dtype)) for name, (shape, dtype) in state["tensors"].items()}
    check_structure(state["state"], "the local copy")
    return {"tensors": described, "boxes": dict(state["boxes"]), "state": state["state"]}


class _LocalSource:
    """What one rank held, as a checkpoint; it answers for this rank's boxes only."""

    def __init__(
        self,
        own: CheckpointSource,
        boxes: Mapping[str, Sequence[tuple[str, Shape, Shape]]],
        shapes: Mapping[str, TensorInfo],
        state: dict[str, Any],
    ) -> None:
        self._own, self._boxes, self._shapes, self._state = own, boxes, shapes, state

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._shapes

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def read(self, pieces: Iterable[Piece]) -> None:
        wanted: list[Piece] = []
        for piece in pieces:
            found = list(self._parts(piece))
            if sum(prod(part.view.shape) for part in found) != piece.view.numel():
                raise CheckpointError(
                    f"{piece.name}: this rank's local copy lacks a part of it. Local copies fit the layout that wrote them; "
                    "resume from a checkpoint of the shared file system."
                )
            wanted += found
        self._own.read(wanted)

    def _parts(self, piece: Piece) -> Iterable[Piece]:
        for stored, offset, shape in self._boxes.get(piece.name, ()):
            common = overlap(piece.offset, tuple(piece.view.shape), tuple(offset), tuple(shape))
            if common is not None:
                low, extent = common
                target: Tensor = piece.view[slices(low, extent, piece.offset)]
                yield Piece(stored, tuple(a - o for a, o in zip(low, offset, strict=True)), target)
