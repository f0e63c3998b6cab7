"""What takes the place of a parameter in the optimizer of this rank: no, one, or several tensors to step.

not sharded, fp32               the parameter itself
not sharded, half precision     an fp32 master of its shape
sharded                         this rank's fragment: a view of the parameter when that is fp32, else an fp32 master
stepped on the CPU              a copy of one of these in host memory
stepped as matrices             the whole logical matrices that this rank owns (``matrices``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron_lightning.parallel.sharding import Shape, ShardSpec

Pieces = list[tuple[Shape, Tensor]]
"""(global offset, view) of boxes of a global tensor."""


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor that the optimizer steps."""

    target: nn.Parameter
    """What stands in the optimizer's parameter group."""
    place: Callable[[Tensor], Pieces]
    """Says where the elements of a tensor of the target's shape lie in the global parameter."""


@dataclass(eq=False)
class Entry:
    """One parameter of the user's optimizer, and what this rank steps of it."""

    name: str
    spec: ShardSpec
    group: dict[str, Any]
    """The optimizer's group that it belongs to."""
    sharded: bool = False
    """Whether data-parallel ranks hold different parts of its state."""
    carrier: nn.Parameter | None = None
    """The tensor whose ``grad`` is the reduced gradient of what is here; None: nothing of the parameter is."""
    value: Tensor | None = None
    """View of what is here of the parameter."""
    start: int = 0
    """Index of its first element in the flattened local parameter."""
    parts: list[Part] = field(default_factory=list)
    """What is stepped here."""
    is_master: bool = False
    """Whether ``value`` itself is the fp32 master of a parameter that is used in lower precision."""
    exchanged: bool = False
    """Whether the parts are whole matrices, put together from what tensor-parallel ranks hold or split from fused weights."""

    @property
    def global_name(self) -> str:
        """The name under which checkpoints know it: for a tied copy the owner's."""
        return self.spec.tied_to or self.name

    @property
    def has_master(self) -> bool:
        """Whether what is stepped is more precise than the parameter."""
        if self.value is None or not self.parts:
            return False
        return self.is_master or self.parts[0].target.dtype != self.value.dtype

    @property
    def copied(self) -> bool:
        """Whether what is stepped has to be copied into the parameter afterwards."""
        if self.value is None or not self.parts or self.exchanged:
            return False
        return self.parts[0].target.data_ptr() != self.value.data_ptr()
