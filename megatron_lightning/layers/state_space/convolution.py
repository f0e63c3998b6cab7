"""Causal depthwise convolution over a few tokens: every channel mixes a token with the tokens
before.

Shapes: ``s`` sequence, ``b`` batch, ``c`` channels, ``k`` tokens of the kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class CausalConvolution(nn.Module):
    """Weight [c, 1, k] and bias [c] of a causal depthwise convolution, with the names and shapes of
    ``nn.Conv1d``.

    Args:
        channels: Number of channels.
        kernel: Tokens that an output reads: the token and ``kernel - 1`` tokens before.
        bias: Whether a bias is added.
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters like ``nn.Conv1d``."""
        bound = 1 / math.sqrt(self.kernel)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def kernel(self) -> int:
        """Tokens that an output reads."""
        return self.weight.shape[2]

    def forward(
        self, x: Tensor, before: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Map x [s, b, c] to [s, b, c] in at least fp32: see :func:`causal_convolution`."""
        return causal_convolution(x, self.weight, self.bias, before, positions)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Convolve every channel with the tokens before, in at least fp32.

    The sum over shifted views needs no transposed copies, and autograd keeps one tensor for all
    shifts.

    Args:
        x: [s, b, c] tokens.
        weight: [c, 1, k]. The last entry belongs to the token itself.
        bias: [c]. None: no bias.
        before: [k - 1, b, c] tokens before the first token. None: zeros.
        positions: [s, b or 1] positions of the tokens in their documents. Tokens see only tokens of
            the same document. None: a row is one document.

    Returns:
        [s, b, c].
    """
    x, weight = wide(x), wide(weight)
    kernel, length = weight.shape[2], x.shape[0]
    first = x.new_zeros(kernel - 1, *x.shape[1:]) if before is None else before.to(x.dtype)
    padded = torch.cat([first, x]) if kernel > 1 else x
    out = x * weight[:, 0, -1]
    for distance in range(1, kernel):
        start = kernel - 1 - distance
        shifted = padded[start : start + length]
        if positions is not None:
            shifted = shifted.masked_fill((positions < distance).unsqueeze(-1), 0.0)
        out = torch.addcmul(out, shifted, weight[:, 0, start])
    return out if bias is None else out + wide(bias)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
