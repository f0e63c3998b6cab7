"""Rotary position embedding (https://arxiv.org/abs/2104.09864), the form that rotates the two
halves of a head.

Shapes: ``s`` sequence, ``b`` batch, ``r`` rotated channels of a head (``rotary_dim``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions; without parameters and buffers, so that nothing needs
    materializing.

    Args:
        rotary_dim: Rotated channels of a head, even.
        base: Base of the frequencies.
    """

    def __init__(self, rotary_dim: int, base: float) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.base = base
        self._last: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def forward(
        self, length: int, like: Tensor, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in ``like``'s dtype and on its device, each [s, b or 1, r/2].

        The positions are 0 to ``length`` - 1, or ``position_ids`` [b, s] for packed or shifted
        sequences.
        """
        if position_ids is not None:
            return self._table(position_ids.t(), like)
        # A recomputed layer would find a cached table, and trace another graph.
        if torch.compiler.is_compiling():
            return self._table(torch.arange(length, device=like.device)[:, None], like)
        key = (length, like.device, like.dtype)
        if self._last is None or self._last[0] != key:
            # Lightning validates in inference mode; a table made there could not be used in
            # training afterwards.
            with torch.inference_mode(False):
                self._last = (
                    key,
                    self._table(torch.arange(length, device=like.device)[:, None], like),
                )
        return self._last[1]

    def _table(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        exponents = (
            torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=like.device)
            / self.rotary_dim
        )
        angles = positions.float()[..., None] / self.base**exponents
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys ``x`` [s, b, ..., d] with the first r channels rotated; cosines and
    sines are [s, b or 1, r/2].
    """
    shape = (*cosines.shape[:2], *(1,) * (x.ndim - 3), cosines.shape[2])
    cosines, sines = cosines.view(shape), sines.view(shape)
    half = cosines.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1)
