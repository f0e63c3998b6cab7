"""The shards of a named tensor on each rank.

Every rank describes the rank's shards as :class:`TensorShards`: the global name and shape of a
tensor, and boxes of the tensor as views of local memory. The origin of the boxes (tensor parallel,
a flat range of an optimizer shard, a full tensor) does not matter, neither for saving nor for
loading. Any layout therefore reads any other. Ranks with the same boxes share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.shards.spec import Shape, Shard, ShardSpec


@dataclass(frozen=True)
class TensorShards:
    """The shards of a tensor on this rank.

    Raises:
        CheckpointError: If a shard is sparse, is not inside the global shape or has another dtype.
    """

    name: str
    """Global name, the same under every layout."""
    global_shape: Shape
    """Shape of the full tensor."""
    dtype: torch.dtype
    """Dtype of the shards."""
    shards: Sequence[Shard]
    """Views of this rank's memory: the source of a save, the destination of a load."""
    writes: bool = True
    """Whether a save writes these shards. One rank writes each shard, or ``replicas`` split the
    shard."""
    replicas: AxisGroup = ALONE
    """Ranks that hold exactly these shards and divide writing and reading among themselves."""

    def __post_init__(self) -> None:
        for offset, data in self.shards:
            if data.layout != torch.strided:
                raise CheckpointError(
                    f"{self.name} is {str(data.layout).removeprefix('torch.')}, and a checkpoint "
                    "holds dense tensors. Make it dense, or leave it out of the state dict "
                    "(register_buffer with persistent=False)."
                )
            fits = len(offset) == data.dim() == len(self.global_shape) and all(
                o >= 0 and o + n <= global_size
                for o, n, global_size in zip(offset, data.shape, self.global_shape, strict=True)
            )
            if not fits or data.dtype != self.dtype:
                raise CheckpointError(
                    f"{self.name}: a shard of shape {tuple(data.shape)} and {data.dtype} at "
                    f"{offset} does not fit into a tensor of shape {self.global_shape} and "
                    f"{self.dtype}. Its sharding is declared wrongly."
                )

    @classmethod
    def full(
        cls, name: str, tensor: Tensor, *, writes: bool = True, replicas: AxisGroup = ALONE
    ) -> TensorShards:
        """Return the shards of a tensor held in full by this rank."""
        shape = tuple(tensor.shape)
        return cls(
            name, shape, tensor.dtype, [Shard((0,) * len(shape), tensor.detach())], writes, replicas
        )

    @classmethod
    def local(
        cls,
        name: str,
        spec: ShardSpec,
        tensor: Tensor,
        *,
        writes: bool = True,
        replicas: AxisGroup = ALONE,
    ) -> TensorShards:
        """Return the shards of a local tensor of the spec's local shape (a parameter, a moment)."""
        return cls(
            name, spec.global_shape, tensor.dtype, spec.shards(tensor.detach()), writes, replicas
        )

    @classmethod
    def flat(
        cls,
        name: str,
        spec: ShardSpec,
        flat: Tensor,
        start: int,
        *,
        writes: bool = True,
        replicas: AxisGroup = ALONE,
    ) -> TensorShards:
        """Return the shards of elements [start, start + len) of the flattened local tensor (an
        optimizer shard).
        """
        return cls(
            name,
            spec.global_shape,
            flat.dtype,
            spec.flat_shards(flat.detach(), start),
            writes,
            replicas,
        )
