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
from megatron_lightning.checkpoint.source import CheckpointSource
from megatron_lightning.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_lightning.strategies.megatron import MegatronStrategy


def save_copy(
    strategy: MegatronStrategy, tensors: Sequence[TensorShards], state: Mapping[str, Any], *, path: str, folder: str
) -> None:
    """Write every rank's part into its node's ``folder`` and the next node's, and the pointer ``path``; all ranks call this.

    Raises:
        CheckpointError: On every rank, if one of them failed; older copies are intact.
    """
    context, ranks_per_node, step = strategy.context, max(1, strategy.num_processes), int(state["global_step"])
    LocalCopies(folder, context.axis("world"), ranks_per_node).save(step, tensors, state)
    pointer = Pointer(folder, ranks_per_node, step, asdict(context.layout))
    on_first_rank(context.axis("world"), lambda: pointer.write(path))


def open_copy(strategy: MegatronStrategy, path: str) -> CheckpointSource | None:
    """Open what a pointer leads to: the newest copy that all ranks have, else the newest checkpoint beside the pointer.

    Args:
        strategy: Whose ranks they are; all of them call this.
        path: The pointer, or any other path.

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
    same = pointer.layout == asdict(context.layout) and pointer.ranks_per_node == ranks_per_node
    copy = LocalCopies(pointer.folder, group, ranks_per_node).open() if same else None
    if copy is not None:
        return copy
    shared = on_first_rank(group, lambda: [str(found.path) for found in list_checkpoints(Path(path).parent)])
    if not shared:
        raise CheckpointError(
            f"{path} points to local copies in {pointer.folder}, of which some rank's part is on no node (or they are of "
            f"another layout), and {Path(path).parent} has no other checkpoint. Delete {path} to start anew."
        )
    rank_zero_warn(f"Not every rank's local copy is there; going on from {shared[-1]}.")
    return open_checkpoint(shared[-1], group=group)
