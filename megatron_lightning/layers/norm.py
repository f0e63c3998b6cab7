"""The norms of the transformer: RMSNorm and LayerNorm, chosen by the config."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.change_class import change_class
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.grid.context import AxisGroup


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for CPUs. Torch's CPU version runs ten kernels and keeps two tensors.

        y = x r w            r = (mean(x^2) + eps)^-1/2, and 1 + w in place of w if zero-centered
        dx = r (dy w - x r^2 mean(dy w x))          dw = sum(dy x r) over tokens

    Half precision is computed in fp32, as torch does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
        wide_x = x.to(_wide(x))
        norm: Tensor = torch.linalg.vector_norm(wide_x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.centered = centered
        gain = weight.to(scale.dtype) + 1.0 if centered else weight
        return (wide_x * scale).mul_(gain).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        wide_x, grad, w = (tensor.to(scale.dtype) for tensor in (x, grad, weight))
        if ctx.centered:
            w = w + 1.0
        products = grad * wide_x
        means = (products @ w).unsqueeze(-1).mul_(scale).mul_(scale).div_(-x.shape[-1])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = products.mul_(scale).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_x = torch.mul(grad, w, out=products).addcmul_(wide_x, means).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm (https://arxiv.org/abs/1910.07467) over the last dim, in fewer passes on a
    CPU.
    """

    zero_centered = False
    """Whether the norm multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, *, zero_centered: bool = False
) -> Tensor:
    """Return RMSNorm of x [..., size]: torch's fused kernel on a GPU, a compiler-fused graph, or
    our function on a CPU.

    With ``zero_centered`` the gain 1 + weight exists in fp32 alone: half precision would round the
    weight away.
    """
    is_plain = type(x) is Tensor and eps is not None
    if x.device.type != "cpu" or not is_plain or torch.compiler.is_compiling():
        if zero_centered:
            gain = 1.0 + weight.to(_wide(x))
            return F.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return out


class MixedRMSNorm(RMSNorm):
    """RMSNorm of an input more precise than the weight, computed in the input's dtype and returned
    in the weight's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        weight, centered = self.weight.to(x.dtype), self.zero_centered
        return rms_norm(x, weight, self.eps, zero_centered=centered).to(self.weight.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm (https://arxiv.org/abs/1607.06450), or with a gain of 1 + weight."""

    zero_centered = False
    """Whether the norm multiplies by 1 + weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if not self.zero_centered:
            return super().forward(input)
        wide_x = _wide(input)
        gain = 1.0 + self.weight.to(wide_x)
        bias = None if self.bias is None else self.bias.to(wide_x)
        out = F.layer_norm(input.to(wide_x), self.normalized_shape, gain, bias, self.eps)
        return out.to(input.dtype)


class MixedLayerNorm(LayerNorm):
    """LayerNorm of an input more precise than the weight. Dtypes as in :class:`MixedRMSNorm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        weight = self.weight.to(input.dtype)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        weight = 1.0 + weight if self.zero_centered else weight
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps).to(
            self.weight.dtype
        )


class HeadsRMSNorm(RMSNorm):
    """RMSNorm over all heads of a token, with heads split over ranks.

    Ranks may share heads, each head equally often (:class:`SharedGroupsLinear`).

    Every rank holds the full weight and uses the rows of its heads. The gradient is a partial sum.
    """

    group: AxisGroup
    """Ranks that split the heads."""

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, group: AxisGroup) -> HeadsRMSNorm:
        """Change the norm over all heads in place, and return the norm."""
        return change_class(norm, cls, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the heads [..., width] of this rank."""
        width, group = x.shape[-1], self.group
        wide_x = x.to(torch.promote_types(x.dtype, torch.float32))
        # The heads of every rank use the mean, so the gradient of the mean is also a sum over
        # ranks.
        total = reduce_from_axis(wide_x.square().mean(-1, keepdim=True), group)
        mean = copy_to_axis(total, group) / group.size
        num_parts = self.weight.numel() // width
        first = group.rank * num_parts // group.size * width
        gain = self.weight.narrow(0, first, width).to(wide_x.dtype)
        gain = gain + 1.0 if self.zero_centered else gain
        return (wide_x * (mean + (self.eps or 0.0)).rsqrt() * gain).to(x.dtype)


def build_norm(config: TransformerConfig, size: int) -> nn.Module:
    """Return the config's norm over a last dim of ``size``."""
    rms, layer = (
        (MixedRMSNorm, MixedLayerNorm)
        if config.fp32_residual_connection
        else (RMSNorm, LayerNorm if config.layernorm_zero_centered_gamma else nn.LayerNorm)
    )
    kind = rms if config.normalization == "RMSNorm" else layer
    options = {} if issubclass(kind, nn.RMSNorm) else {"bias": config.layernorm_bias}
    norm = kind(size, eps=config.layernorm_epsilon, **options)
    if config.layernorm_zero_centered_gamma and isinstance(norm, (RMSNorm, LayerNorm)):
        norm.zero_centered = True
        nn.init.zeros_(norm.weight)
    return norm
