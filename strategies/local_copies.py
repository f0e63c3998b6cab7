"""A strategy's copies on the nodes' own disks (``checkpoint.local``): where they are, and what to go on from without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.checkpoint import TensorShards, open_checkpoint
from megatron_lightning.checkpoint.agreement import on_first_rank
from megatron_lightning.checkpoint.local import LocalCopies, Pointer
from megatron_lightning.checkpoint.pruning import list_checkpoints
from megatron_lightning.checkpoint.saving import Snapshot
from megatron_lightning.checkpoint.source import CheckpointSource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.strategies.saver import Save, Saver

if TYPE_CHECKING:
    from megatron_lightning.strategies.stepping import MegatronSteps


def copy_plan(
    strategy: MegatronSteps, tensors: Sequence[TensorShards], state: Mapping[str, Any], *, path: str, folder: str
) -> Save:
    """Plan to write every rank's part into its node's ``folder`` and the next node's, and the pointer ``path`` after them.

    Args:
        strategy: Whose ranks they are.
        tensors: All that this rank holds.
        state: Everything else, as the first rank has it.
        path: The pointer.
        folder: Folder on each node; ``{node_rank}`` in it stands for the node's number.
    """
    ranks_per_node, step = max(1, strategy.num_processes), int(state["global_step"])
    pointer = Pointer(folder, ranks_per_node, strategy.context.world_size, step, _sharding(strategy))

    def take(group: AxisGroup) -> Snapshot:
        return LocalCopies(folder, group, ranks_per_node).take_snapshot(step, tensors, state)

    def write(snapshot: Snapshot, group: AxisGroup) -> None:
        LocalCopies(folder, group, ranks_per_node).write(snapshot)
        on_first_rank(group, lambda: pointer.write(path, Path(snapshot.path).parent.name))

    return Save(path, take, write, replaces=False)


def open_copy(strategy: MegatronSteps, path: str, saver: Saver) -> CheckpointSource | None:
    """Open what a pointer leads to: the newest copy that serves this layout, else the newest checkpoint beside the pointer.

    Args:
        strategy: Whose ranks they are; all of them call this.
        path: The pointer, or any other path.
        saver: Has the communicator for parts that are brought from another node.

    Returns:
        What to load; None if ``path`` is no pointer.

    Raises:
        CheckpointError: On every rank, if there is neither.
    """
    context, ranks_per_node = strategy.context, max(1, strategy.num_processes)
    group = context.axis("world")
    pointer = on_first_rank(group, lambda: Pointer.read(path))
    if pointer is None:
        return None
    before, now = (pointer.num_ranks, pointer.ranks_per_node), (context.world_size, ranks_per_node)
    same_layout = before == now and pointer.layout == _sharding(strategy)
    copies = LocalCopies(pointer.folder, saver.group(context), ranks_per_node)
    copy = copies.open(pointer.copies, pointer.num_ranks, same_layout=same_layout)
    if copy is not None:
        return copy
    lack = f"of the local copies in {pointer.folder} none has the parts of all {pointer.num_ranks} ranks on some node"
    if not same_layout:
        lack = (
            f"the local copies in {pointer.folder} are of another layout ({pointer.num_ranks} ranks of {pointer.layout}), and "
            "not every node has all parts of one"
        )
    shared = on_first_rank(group, lambda: [str(found.path) for found in list_checkpoints(Path(path).parent)])
    if not shared:
        raise CheckpointError(f"{lack}, and {Path(path).parent} has no other checkpoint. Delete {path} to start anew.")
    rank_zero_warn(f"Going on from {shared[-1]}: {lack}.")
    return open_checkpoint(shared[-1], group=group)


def _sharding(strategy: MegatronSteps) -> dict[str, Any]:
    return {**asdict(strategy.context.layout), "data_parallel": strategy.data_parallel}
