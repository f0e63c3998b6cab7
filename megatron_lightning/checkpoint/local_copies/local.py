"""Copies of a run's state on each node's own disk, and on a neighbor's: recovery without the shared
file system.

Every rank writes all of the rank's shards as an ordinary checkpoint, the rank's *part* of the copy
(``local_parts``). The rank at the same position on the next node receives and keeps the part too. A
run resumed under the same layout takes the newest copy with each rank's part on any node: on the
rank's node, or on the neighbor if a node was replaced. A run of another layout takes the newest
copy complete on every node (possible with one or two nodes). Each rank then reads boxes from all
parts.

    <folder of the node>/step-000000001200-<id>/rank-00003/manifest.json …

A small file on the shared file system, the *pointer*, records the folder and the names of the run's
copies: all ranks know the copies, even with an empty disk. The idea follows NVIDIA Resiliency
Extension's local checkpointing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.checkpoint.agreement import on_first_rank, together
from megatron_lightning.checkpoint.format.files import new_identifier, sync_directory, write_file
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.storage import completed_file
from megatron_lightning.checkpoint.local_copies.local_parts import (
    PartsSource,
    open_part,
    part_snapshot,
)
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.checkpoint.writing.saving import Snapshot, write_snapshot
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.tensor_shards import TensorShards

NODE = "{node_rank}"
"""Represents the node's number in the folder of the copies."""
_CHUNK_BYTES = 16 << 20  # a single chunk is in memory during a transfer
_NUM_KEPT = 2  # the newest may be lost during the write
_NAME = re.compile(r"step-(\d{12})-[0-9a-f]{12}")
_FORMAT = "megatron_lightning local copies"


@dataclass(frozen=True)
class Pointer:
    """Content of the pointer file."""

    folder: str
    """Folder on each node. ``{node_rank}`` represents the node's number."""
    ranks_per_node: int
    """Ranks of a node."""
    num_ranks: int
    """Ranks of the run. Each rank writes a part of a copy."""
    step: int
    """Step of the newest copy when the file was written."""
    layout: Mapping[str, Any]
    """Layout values that determine the shards of a rank: sizes of the parallel axes, and the kind
    of data parallelism."""
    copies: Sequence[str] = ()
    """Names of the run's copies, the newest first. The folder may contain copies of other runs."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The run of the copies, as in a checkpoint."""

    def write(self, path: str, newest: str) -> None:
        """Write the file with an additional copy. The complete file replaces the previous file."""
        known_names: Sequence[str] = ()
        with suppress(CheckpointError):  # a damaged pointer is replaced
            pointer = Pointer.read(path)
            known_names = pointer.copies if pointer is not None else ()
        copies = [newest, *(name for name in known_names if _step_of(name) < _step_of(newest))][
            :_NUM_KEPT
        ]
        with completed_file(path) as file:
            file.write(json.dumps({"format": _FORMAT, **asdict(self), "copies": copies}).encode())

    @classmethod
    def read(cls, path: str) -> Pointer | None:
        """Return a pointer file's content. None for any other file, for a directory and for
        nothing.
        """
        file = Path(path)
        # Called with any path that a user resumes from, so that a large file must not be read as
        # JSON.
        if not file.is_file() or file.stat().st_size > 1 << 16:
            return None
        try:
            content = json.loads(file.read_bytes())
        except ValueError:
            return None
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            return None
        kinds = {
            "folder": str,
            "ranks_per_node": int,
            "num_ranks": int,
            "step": int,
            "layout": dict,
            "copies": list,
            "run": dict,
        }
        content.setdefault("run", {})  # of an earlier release
        fits = content.keys() == kinds.keys() and all(
            isinstance(content[key], kind) for key, kind in kinds.items()
        )
        if not fits or not all(
            isinstance(name, str) and _NAME.fullmatch(name) for name in content["copies"]
        ):
            raise CheckpointError(
                f"{path} is a pointer to local copies and is damaged. Delete it and resume from "
                "another."
            )
        return cls(**content)


class LocalCopies:
    """The copies of a run, seen from this rank. Public methods are collectives.

    Args:
        folder: See :class:`Pointer`.
        group: All ranks of the job, with a process group for CPU tensors.
        ranks_per_node: Ranks of a node. Ranks are numbered node by node.
    """

    def __init__(self, folder: str, group: AxisGroup, ranks_per_node: int) -> None:
        self._group = group
        self._ranks_per_node = ranks_per_node
        self._folder = Path(folder.replace(NODE, str(group.rank // ranks_per_node)))

    def take_snapshot(
        self, step: int, tensors: Iterable[TensorShards], state: Mapping[str, Any]
    ) -> Snapshot:
        """Collect this rank's part of the copy of a step: all of the rank's shards, and on the
        first rank the rest of the state.
        """
        name = f"step-{step:012d}-{on_first_rank(self._group, new_identifier)}"
        part = self._part(name, self._group.rank)
        mine = state if self._group.rank == 0 else {}
        return together(
            self._group, "collecting a local copy", lambda: part_snapshot(part, tensors, mine)
        )

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's part of a copy and send the part to the next node. If a rank fails,
        older copies are intact.
        """
        name = Path(snapshot.path).parent.name
        together(self._group, "writing a local copy", lambda: write_snapshot(snapshot))
        self._replicate(name)
        together(self._group, "deleting old local copies", lambda: self._delete_old(name))

    def open(
        self, names: Sequence[str], num_ranks: int, *, same_layout: bool
    ) -> CheckpointSource | None:
        """Return the newest copy with all parts on the needed nodes. None if no copy is complete.

        Args:
            names: The copies named by the pointer, the newest first.
            num_ranks: Ranks of the writing run.
            same_layout: Whether each rank of this run needs exactly the part written by the rank of
                the same number.
        """
        group, all_ranks = self._group, set(range(num_ranks))
        copies_of_ranks = group.all_gather_object(self._held())
        # With the same layout a part may come from any node, since each rank reads one part,
        # fetched if needed. Otherwise every rank may read from all parts, so each node needs them
        # all.
        places = [set().union(*copies_of_ranks)] if same_layout else copies_of_ranks
        complete = [
            name
            for name in names
            if all(
                {rank for part_name, rank in parts if part_name == name} >= all_ranks
                for parts in places
            )
        ]
        if not complete:
            return None
        name = complete[0]
        # Nodes without their ranks' parts (replaced machines) receive them from the buddy.
        if same_layout:
            self._fetch(
                name, [{rank for n, rank in parts if n == name} for parts in copies_of_ranks]
            )
        # Headers are shared out among the ranks, and everyone learns all.
        first = range(group.rank, num_ranks, group.size)
        opened = together(
            group,
            "opening a local copy",
            lambda: [open_part(self._part(name, rank)) for rank in first],
        )
        shapes: dict[str, TensorInfo] = {}
        for described in group.all_gather_object([part.tensors for part in opened]):
            for tensors in described:
                shapes.update(tensors)
        state = on_first_rank(group, lambda: opened[0].state)
        other_parts = [self._part(name, rank) for rank in range(num_ranks) if rank not in first]
        return PartsSource(opened, other_parts, shapes, state)

    def _part(self, name: str, rank: int) -> Path:
        return self._folder / name / f"rank-{rank:05d}"

    def _held(self) -> set[tuple[str, int]]:
        """Return (copy, rank) of every part on this node."""
        copies = set()
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            if _NAME.fullmatch(folder.name):
                parts = [
                    part
                    for part in folder.iterdir()
                    if re.fullmatch(r"rank-\d{5}", part.name) and is_committed(part)
                ]
                copies |= {(folder.name, int(part.name[5:])) for part in parts}
        return copies

    def _replicate(self, name: str) -> None:
        """Send this rank's part to the next node and receive a part from the previous node."""
        group, step = self._group, self._ranks_per_node
        to, source = self._next(group.rank), (group.rank - step) % group.size
        if to == group.rank:
            return  # a single node has no neighbor
        send = partial(self._send, self._part(name, group.rank), to)
        receive = partial(self._receive, self._part(name, source), source)
        is_even = group.rank // step % 2 == 0  # even nodes send first, odd nodes receive first
        self._run_transfers(
            [send, receive] if is_even else [receive, send], "sending a local copy to the next node"
        )

    def _fetch(self, name: str, held: Sequence[set[int]]) -> None:
        """Send each missing part to the part's rank and to the next node: a new node gets the parts
        of the replaced node.
        """
        transfers = []
        for rank in range(self._group.size):
            holder = next(holder for holder, parts in enumerate(held) if rank in parts)
            for receiver in dict.fromkeys((rank, self._next(rank))):
                if rank not in held[receiver] and self._group.rank == holder:
                    transfers.append(partial(self._send, self._part(name, rank), receiver))
                elif rank not in held[receiver] and self._group.rank == receiver:
                    transfers.append(partial(self._receive, self._part(name, rank), holder))
        self._run_transfers(transfers, "sending a local copy to its node")

    def _run_transfers(self, transfers: Iterable[Callable[[], None]], doing: str) -> None:
        """Run this rank's transfers, even after a failure: other ranks wait for the rest."""
        failures: list[Exception] = []
        for transfer in transfers:
            try:
                transfer()
            except (OSError, CheckpointError) as error:
                failures.append(error)

        def agree() -> None:
            if failures:
                raise failures[0]

        together(self._group, doing, agree)

    def _next(self, rank: int) -> int:
        """Return the rank at the same position on the next node. On a single node, return
        ``rank``.
        """
        alone = self._ranks_per_node >= self._group.size
        return rank if alone else (rank + self._ranks_per_node) % self._group.size

    def _send(self, part: Path, rank: int) -> None:
        """Send the files of a part. If the files cannot be read, send the reason, to be raised by
        the receiver.
        """
        failure = ""
        try:
            for name in sorted(os.listdir(part)):
                with open(part / name, "rb", buffering=0) as file:
                    while data := file.read(_CHUNK_BYTES):
                        self._send_object((name, data), rank)
        except OSError as error:
            failure = f"rank {self._group.rank} cannot read {part} ({error})"
        self._send_object(failure, rank)

    def _receive(self, part: Path, rank: int) -> None:
        temporary = part.with_name(f"{part.name}.tmp-{new_identifier()}")
        messages = self._messages(rank)
        try:
            temporary.mkdir(parents=True)
            for name, chunks in groupby(messages, key=itemgetter(0)):
                write_file(temporary / name, (data for _, data in chunks))
            sync_directory(temporary)
            os.rename(temporary, part)
            sync_directory(part.parent)
        except OSError:
            for _ in messages:  # the sender waits until all is received
                pass
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _messages(self, rank: int) -> Iterator[tuple[str, bytes]]:
        """Yield (file name, next bytes of the file) from another rank."""
        messages: list[Any] = [None]
        while True:
            dist.recv_object_list(
                messages, self._group.ranks[rank], self._group.process_group, torch.device("cpu")
            )
            if not isinstance(messages[0], tuple):
                break
            yield messages[0]
        if messages[0]:
            raise CheckpointError(messages[0])

    def _send_object(self, value: Any, rank: int) -> None:
        dist.send_object_list(
            [value], self._group.ranks[rank], self._group.process_group, torch.device("cpu")
        )

    def _delete_old(self, newest: str) -> None:
        """Keep the copy just written and earlier copies. Copies of later steps are from an
        abandoned run.
        """
        if self._group.rank % self._ranks_per_node == 0:
            names = {
                folder.name for folder in self._folder.iterdir() if _NAME.fullmatch(folder.name)
            }
            old_names = sorted(name for name in names if _step_of(name) < _step_of(newest))
            for name in names - {newest, *old_names[1 - _NUM_KEPT :]}:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _step_of(name: str) -> str:
    return name.rpartition("-")[0]
