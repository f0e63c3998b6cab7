"""What each rank holds of the tensors of a checkpoint.

Every rank states what it holds as :class:`TensorShards`: the global name and shape of a tensor, and boxes of it as views of
its own memory. How the boxes came about (tensor parallel, a flat range of an optimizer shard, a whole tensor) does not matter,
neither for saving nor for loading, which is why any layout reads any other. Ranks that hold the same boxes share the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_lightning.checkpoint.agreement import ALONE
from megatron_lightning.checkpoint.manifest import Shape
from megatron_lightning.checkpoint.shard_file import Piece
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import part_of

if TYPE_CHECKING:
    from megatron_lightning.parallel.context import ParallelContext
    from megatron_lightning.parallel.sharding import ShardSpec

PART_BYTES = 4 << 20
"""Boxes up to this size are not divided among replicas."""


@dataclass(frozen=True)
class TensorShards:
    """What this rank holds of one tensor.

    Raises:
        CheckpointError: If a piece is sparse, is not inside the global shape or has another dtype.
    """

    name: str
    """Global name, the same under every layout."""
    global_shape: Shape
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Dtype of the pieces."""
    pieces: Sequence[tuple[Shape, Tensor]]
    """(first index in the global tensor, view of this rank's memory): the source of a save, the destination of a load."""
    writes: bool = True
    """Whether a save writes these pieces; of the ranks that hold them, exactly one does, or exactly those of ``replicas``."""
    replicas: AxisGroup = ALONE
    """Ranks that hold exactly these pieces and divide writing and reading among themselves."""

    def __post_init__(self) -> None:
        for offset, view in self.pieces:
            if view.layout != torch.strided:
                raise CheckpointError(
                    f"{self.name} is {str(view.layout).removeprefix('torch.')}, and a checkpoint holds dense tensors. Make it "
                    "dense, or leave it out of the state dict (register_buffer with persistent=False)."
                )
            fits = len(offset) == view.dim() == len(self.global_shape) and all(
                o >= 0 and o + n <= full for o, n, full in zip(offset, view.shape, self.global_shape, strict=True)
            )
            if not fits or view.dtype != self.dtype:
                raise CheckpointError(
                    f"{self.name}: a piece of shape {tuple(view.shape)} and {view.dtype} at {offset} does not fit into a "
                    f"tensor of shape {self.global_shape} and {self.dtype}. Its sharding is declared wrongly."
                )

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, writes: bool = True, replicas: AxisGroup = ALONE) -> TensorShards:
        """Return the shards of a tensor that this rank holds whole."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, [((0,) * len(shape), tensor.detach())], writes, replicas)

    @classmethod
    def local(
        cls, name: str, spec: ShardSpec, tensor: Tensor, *, writes: bool = True, replicas: AxisGroup = ALONE
    ) -> TensorShards:
        """Return the shards of a local tensor of the spec's local shape (a parameter, a moment)."""
        return cls(name, spec.global_shape, tensor.dtype, spec.pieces(tensor.detach()), writes, replicas)

    @classmethod
    def flat(
        cls, name: str, spec: ShardSpec, flat: Tensor, start: int, *, writes: bool = True, replicas: AxisGroup = ALONE
    ) -> TensorShards:
        """Return the shards of elements [start, start + len) of the flattened local tensor (an optimizer shard)."""
        return cls(name, spec.global_shape, flat.dtype, spec.flat_pieces(flat.detach(), start), writes, replicas)


def parts_of(name: str, offset: Shape, view: Tensor, num_replicas: int) -> Iterator[tuple[int, Piece]]:
    """Divide a box among the ranks that hold it: yield (replica, its part).

    The answer depends on nothing but the arguments, so all ranks agree without a word. Small boxes go whole to one replica,
    which the tensor's name chooses, so that many of them are spread evenly.
    """
    first = zlib.crc32(name.encode()) % num_replicas
    dim = next((dim for dim, n in enumerate(view.shape) if n > 1), None)  # the parts of a contiguous box are contiguous
    wanted = min(num_replicas, -(-view.nbytes // PART_BYTES))
    if dim is None or wanted <= 1:
        yield first, Piece(name, offset, view)
        return
    for turn in range(wanted):
        start, length = part_of(view.shape[dim], wanted, turn)
        if length:
            at = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            yield (first + turn) % num_replicas, Piece(name, at, view.narrow(dim, start, length))


def own_parts(shards: TensorShards) -> list[Piece]:
    """Return what this rank writes of a tensor."""
    if not shards.writes:
        return []
    group = shards.replicas
    return [
        part
        for offset, view in shards.pieces
        for replica, part in parts_of(shards.name, offset, view, group.size)
        if replica == group.rank
    ]


def stands_for(spec: ShardSpec, context: ParallelContext, *, replicated_over: tuple[str, ...] = ()) -> bool:
    """Return whether this rank's data-parallel group writes its part of a parameter.

    Of the groups that hold the same part, the one that stands first on every axis over which the part is replicated does.

    Args:
        spec: The parameter's spec; a tied copy is never written.
        context: The groups of this rank.
        replicated_over: Further axes over which it is replicated (``("pp",)`` for what stands outside the pipeline).
    """
    axes = {"tp", "ep", *replicated_over} - {*spec.sharded_over}
    return spec.tied_to is None and all(context.grid.coordinate(context.rank, axis, spec.grid) == 0 for axis in axes)
