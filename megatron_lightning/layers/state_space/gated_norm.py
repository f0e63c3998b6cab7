"""Gated norm of state-space layers: y silu(z), normalized over the channels of a group of heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.layers.state_space.convolution import wide
from megatron_lightning.layers.state_space.shared_groups import SharedGroups


class GatedNorm(nn.Module):
    """RMSNorm of gated channels, with a mean for each group. The gate comes before the norm.

    Args:
        size: Channels of all heads.
        groups: Groups of heads, each normalized alone.
        eps: Added to the mean of the squares.
    """

    shared_groups: SharedGroups | None = None
    """Tensor-parallel ranks that share the heads of a group. None: a rank has full groups."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.group_size = size // groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the normed w RMSNorm(y silu(gate)) of y [..., d] and gate [..., d], in the dtype
        of the gate. The norm is computed in at least fp32.
        """
        gated = wide(y) * F.silu(wide(gate))
        gated = torch.unflatten(gated, -1, (-1, min(self.group_size, gated.shape[-1])))
        mean = gated.square().mean(-1, keepdim=True)
        if self.shared_groups is not None:
            mean = self.shared_groups.mean(mean)
        normed = (gated * (mean + self.eps).rsqrt()).flatten(-2)
        return (normed * wide(self.weight)).to(gate.dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for ``print``."""
        return f"{self.weight.shape[0]}, group_size={self.group_size}, eps={self.eps}"
