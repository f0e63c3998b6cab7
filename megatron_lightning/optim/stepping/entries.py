"""The tensors stepped on this rank for each parameter of an optimizer: none, one, or several.

not sharded, fp32               the parameter itself
not sharded, half precision     an fp32 main param in the parameter's shape
sharded                         this rank's shard: a view of an fp32 parameter, or an fp32 main
                                param
stepped on the CPU              a copy of one of these in host memory
stepped in full                 the full tensors owned by this rank (``owners``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_lightning.optim.gradients.parameter_shard import ParameterShard
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import Shard, ShardSpec


class Owned(NamedTuple):
    """A parameter stepped in full by owners."""

    group: AxisGroup
    """The ranks with shards of the parameter. One of them owns each target."""
    is_whole: bool
    """Whether the state belongs to the full parameter, and not to its matrices."""
    has_main: bool
    """Whether the targets are more precise than the parameter."""


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor stepped by the optimizer."""

    tensor: nn.Parameter
    """The tensor in the optimizer's parameter group."""
    shards_of: Callable[[Tensor], list[Shard]]
    """Returns the shards of the global parameter in a tensor of the target's shape."""


@dataclass(eq=False)
class OptimizerEntry:
    """A parameter of the user's optimizer, and the tensors stepped for the parameter on this
    rank.
    """

    name: str
    spec: ShardSpec
    group: dict[str, Any]
    """Group of the parameter in the optimizer."""
    sharded: bool
    """Whether data-parallel ranks hold different shards of the parameter's state."""
    shard: ParameterShard | None
    """This rank's shard of the parameter. ``target`` has the reduced gradient. None: only other
    ranks have shards."""
    targets: list[Target] = field(default_factory=list)
    owned: Owned | None = None
    """Owners of the targets. None: this rank steps what it holds."""

    @property
    def global_name(self) -> str:
        """Name in checkpoints: for a tied copy the owner's."""
        return self.spec.tied_to or self.name

    @property
    def is_full(self) -> bool:
        """Whether the only target is the full parameter."""
        return len(self.targets) == 1 and tuple(self.targets[0].tensor.shape) == tuple(
            self.spec.global_shape
        )

    @property
    def keeps_plain(self) -> bool:
        """Whether every target is stepped as on one device, so that the state has its form too."""
        if self.owned is not None:
            return self.owned.is_whole
        shape = None if self.shard is None else tuple(self.shard.value.shape)
        return not self.sharded and shape == tuple(self.spec.global_shape)

    @property
    def has_main(self) -> bool:
        """Whether the targets are more precise than the parameter."""
        if self.owned is not None:
            return bool(self.targets) and self.owned.has_main
        if self.shard is None or not self.targets:
            return False
        return self.shard.is_main or self.targets[0].tensor.dtype != self.shard.value.dtype

    @property
    def copied(self) -> bool:
        """Whether the target must be copied into the parameter after a step."""
        if self.shard is None or not self.targets or self.owned is not None:
            return False
        return self.targets[0].tensor.data_ptr() != self.shard.value.data_ptr()
