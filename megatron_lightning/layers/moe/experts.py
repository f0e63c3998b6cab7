"""The experts of a layer: feed-forward networks with stacked weights [E, out, in].

Shapes: ``n`` rows (a token for one expert), sorted by expert, ``E`` experts, ``h`` hidden (or the
latent's size), ``f`` width of an expert. A grouped GEMM computes all experts (MegaBlocks,
https://arxiv.org/abs/2211.15841, without MegaBlocks' padding).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.activation import build_activation
from megatron_lightning.layers.linear.gemm import Gemm
from megatron_lightning.layers.linear.splittable import Splittable, linear
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup


class GroupedLinear(Splittable, nn.Module):
    """A linear layer for each expert.

    Args:
        num_experts: Number of layers (E).
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether each has a bias.
        one_by_one: Loop over experts instead of calling a grouped GEMM.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        one_by_one: bool = False,
    ) -> None:
        super().__init__()
        if one_by_one:
            self.gemm = Gemm(one_by_one=True)
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features)) if bias else None
        self.group: AxisGroup = ALONE
        """Ranks with the other parts of each expert."""
        self.num_bias_shares = 1
        """Number of ranks that each add an equal share of the bias to a partial sum."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [n, in] to [n, out]. ``counts`` [E]: rows of each expert."""
        if self.engine is not None and self.engine.takes(rows, counts):
            return self.engine(rows, counts)
        out = linear(rows, self, None, counts=counts)
        if self.bias is None:
            return out
        bias = self.bias if self.num_bias_shares == 1 else self.bias / self.num_bias_shares
        return out + bias.to(out.dtype).repeat_interleave(counts, 0, output_size=len(out))

    def extra_repr(self) -> str:
        """Return the sizes, for ``print``."""
        num_experts, out_features, in_features = self.weight.shape
        return (
            f"num_experts={num_experts}, in_features={in_features}, out_features={out_features}, "
            f"bias={self.bias is not None}"
        )


class Experts(nn.Module):
    """Two grouped layers around an activation.

    With a gate, ``linear_fc1`` is [E, 2f, h], with the gate's rows first.

    Args:
        config: Sizes.
        num_experts: Number of experts (E).
    """

    def __init__(self, config: TransformerConfig, num_experts: int) -> None:
        super().__init__()
        h, f = config.expert_hidden_size, config.expert_ffn_size
        options = {
            "bias": config.add_bias_linear,
            "one_by_one": config.moe is not None and not config.moe.grouped_gemm,
        }
        self.activation = build_activation(config)
        self.linear_fc1 = GroupedLinear(num_experts, h, 2 * f if config.gated else f, **options)
        if config.gated:
            self.linear_fc1.fused_rows = (f, f)  # type: ignore[assignment]
        self.linear_fc2 = GroupedLinear(num_experts, f, h, **options)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [n, h] to [n, h]. ``counts`` [E]: rows of each expert."""
        inner = self.activation(self.linear_fc1(rows, counts))
        out: Tensor = self.linear_fc2(inner, counts)
        return out
