"""Saves to the nodes' local disks (``local``), and the choice of the checkpoint to resume from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.checkpoint.agreement import on_first_rank
from megatron_lightning.checkpoint.listing import list_checkpoints
from megatron_lightning.checkpoint.local_copies.local import LocalCopies, Pointer
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.writing.saver import Save
from megatron_lightning.checkpoint.writing.saving import Snapshot
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.tensor_shards import TensorShards


def copy_plan(
    tensors: Sequence[TensorShards], state: Mapping[str, Any], *, path: str, pointer: Pointer
) -> Save:
    """Plan to write every rank's part into the folders of the rank's node and the next node, and
    then the pointer to ``path``.
    """

    def take(group: AxisGroup) -> Snapshot:
        return LocalCopies(pointer.folder, group, pointer.ranks_per_node).take_snapshot(
            pointer.step, tensors, state
        )

    def write(snapshot: Snapshot, group: AxisGroup) -> None:
        LocalCopies(pointer.folder, group, pointer.ranks_per_node).write(snapshot)
        on_first_rank(group, lambda: pointer.write(path, Path(snapshot.path).parent.name))

    return Save(path, take, write, replaces=False)


def open_copy(
    path: str,
    group: AxisGroup,
    *,
    ranks_per_node: int,
    layout: Mapping[str, Any],
    exchange_group: Callable[[], AxisGroup],
) -> CheckpointSource | None:
    """Open the newest copy usable under this layout, else the newest checkpoint in the pointer's
    folder. None without a pointer.

    Args:
        path: The pointer, or any other path.
        group: All ranks. All ranks call this.
        ranks_per_node: Ranks of each node.
        layout: As in :class:`Pointer`.
        exchange_group: Returns the communicator for parts of other nodes.
    """
    pointer = on_first_rank(group, lambda: Pointer.read(path))
    if pointer is None:
        return None
    same_layout = (pointer.num_ranks, pointer.ranks_per_node, pointer.layout) == (
        group.size,
        ranks_per_node,
        layout,
    )
    copies = LocalCopies(pointer.folder, exchange_group(), ranks_per_node)
    copy = copies.open(pointer.copies, pointer.num_ranks, same_layout=same_layout)
    if copy is not None:
        return copy
    lack = (
        f"of the local copies in {pointer.folder} none has the parts of all {pointer.num_ranks} "
        "ranks on some node"
    )
    if not same_layout:
        lack = (
            f"the local copies in {pointer.folder} are of another layout ({pointer.num_ranks} "
            f"ranks of {pointer.layout}), and not every node has all parts of one"
        )
    # One rank lists: file systems of other nodes may see a new folder later.
    paths = on_first_rank(
        group, lambda: [str(checkpoint.path) for checkpoint in list_checkpoints(Path(path).parent)]
    )
    if not paths:
        raise CheckpointError(
            f"{lack}, and {Path(path).parent} has no other checkpoint. Delete {path} to start from "
            "scratch."
        )
    if group.rank == 0:
        warnings.warn(f"Resuming from {paths[-1]}: {lack}.", stacklevel=2)
    return open_checkpoint(paths[-1], group=group)
