"""Parameters with memory replaced by other code (``p.data = ...``).

Shards and buckets view the memory of the parameters. After ``p.data = x`` the model computes with
``x``, and an optimizer of shards would go on stepping the old, unread memory. So addresses are
compared before a step, without a collective and without a wait of the host.

torch silently ignores ``p.data = x`` on a ``DTensor``, and no later check could find the
assignment. So FSDP2's parameters are of class :class:`ShardedParameter`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.fsdp.shard_views import GuardedViews


def check_rebound(name: str, value: Tensor, like: Tensor) -> None:
    """Check that a parameter's new memory can be copied into the old one.

    Args:
        name: Name of the parameter.
        value: The present tensor of the parameter.
        like: The previous tensor, or a similar tensor.

    Raises:
        ConfigError: If shape, dtype or device differ.
    """
    if (value.shape, value.dtype, value.device) != (like.shape, like.dtype, like.device):
        raise ConfigError(
            f"{name}.data was replaced by a tensor of shape {tuple(value.shape)}, {value.dtype}, "
            f"{value.device}; the ranks share the parameter as shape {tuple(like.shape)}, "
            f"{like.dtype}, {like.device}. Write into the parameter instead: "
            f"{name}.data.copy_(...)."
        )


class ShardedParameter(GuardedViews):
    """A parameter sharded by FSDP2, with assignable ``data`` like other parameters."""

    @property
    def data(self) -> Tensor:
        """The values, without a graph. Assigned values are copied into this rank's shard."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ConfigError(
                f"the data of a sharded parameter of shape {tuple(self.shape)}, {self.dtype}, was "
                f"replaced by a tensor of shape {tuple(value.shape)}, {value.dtype}. "
                'data_parallel="fsdp" shares the parameter over the ranks as it is: copy values of '
                "its shape and dtype into it."
            )
        with torch.no_grad():
            if isinstance(value, DTensor):
                value = value.redistribute(self.device_mesh, self.placements)
                self.to_local().copy_(value.to_local())
            else:
                raise ConfigError(
                    f"the data of a sharded parameter of shape {tuple(self.shape)} was replaced by "
                    "a plain tensor of that shape. Each rank holds a part of the parameter "
                    '(data_parallel="fsdp"). Assign a result of p.data, or call '
                    "torch.distributed.tensor.distribute_tensor(value, p.device_mesh, "
                    "p.placements) first."
                )

    def detach(self) -> Tensor:
        """Return the values without a graph, of this class: torch makes parameters from the
        result.
        """
        detached = super().detach()
        detached.__class__ = ShardedParameter
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain copy: only the original is shared with FSDP2."""
        copied = nn.Parameter(super().detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor."""
        return super().detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
