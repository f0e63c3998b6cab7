"""Rotary position embedding (https://arxiv.org/abs/2104.09864), of the two halves of a head or of
neighboring channels, with frequencies scaled for longer sequences as in Llama 3
(https://arxiv.org/abs/2407.21783), by YaRN (https://arxiv.org/abs/2309.00071, section 3), all by a
factor (https://arxiv.org/abs/2306.15595), or by LongRoPE (https://arxiv.org/abs/2402.13753).

Shapes: ``s`` sequence, ``b`` batch, ``r`` rotated channels of a head (``rotary_dim``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.config import RopeScaling


def inverse_frequencies(
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    device: torch.device | None = None,
    *,
    is_long: bool = False,
) -> Tensor:
    """Return the angles [r/2] that rotate the channels per position, in fp32.

    ``is_long``: of documents longer than the pretraining's, which LongRoPE alone distinguishes.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    frequencies = 1.0 / base**exponents
    if scaling is None:
        return frequencies
    if scaling.rope_type == "longrope":
        divisors = scaling.long_factor if is_long else scaling.short_factor
        return 1.0 / (torch.tensor(divisors, device=device) * base**exponents)
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "llama3":
        kept_share = _kept_by_turns(frequencies, scaling)
    else:
        kept_share = _kept_by_channel(frequencies, rotary_dim, base, scaling)
    return (1.0 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _kept_by_turns(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3's weights [r/2] of the original frequencies: linear in their turns over the
    original length.
    """
    turns = scaling.original_length * frequencies / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_channel(
    frequencies: Tensor, rotary_dim: int, base: float, scaling: RopeScaling
) -> Tensor:
    """Return YaRN's weights [r/2] of the original frequencies: linear in the channel between the
    channels with ``beta_fast`` and ``beta_slow`` turns.
    """

    def channel(turns: float) -> float:
        wavelength = scaling.original_length / turns
        return rotary_dim * math.log(wavelength / (2.0 * math.pi)) / (2.0 * math.log(base))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    channels = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    return 1.0 - ((channels - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return YaRN's score factor for latent attention.

    The factor sharpens all channels, not only rotated channels (``yarn_get_mscale`` of DeepSeek's
    models, squared for query and key).
    """
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions, without parameters and buffers, so that nothing needs
    materializing.

    Args:
        rotary_dim: Rotated channels of a head, even.
        base: Base of the frequencies.
        scaling: Scaling of the frequencies for longer sequences, or None.
    """

    def __init__(self, rotary_dim: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.base = base
        self.scaling = scaling
        self._last: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def forward(
        self,
        length: int,
        like: Tensor,
        position_ids: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines with the dtype and device of ``like``, each [s, b or 1, r/2].

        The positions are 0 to ``length`` - 1, or ``position_ids`` [b, s] for packed or shifted
        sequences. ``lengths`` [b or 1, s or 1] are the lengths of the tokens' documents, read by
        LongRoPE. None: ``length``.
        """
        if position_ids is not None or lengths is not None:
            if position_ids is None:
                position_ids = torch.arange(length, device=like.device)[None]
            return self._table(position_ids.t(), like, length if lengths is None else lengths.t())
        # A recomputed layer would find a cached table, and trace another graph.
        if torch.compiler.is_compiling():
            return self._table(torch.arange(length, device=like.device)[:, None], like, length)
        key = (length, like.device, like.dtype)
        if self._last is None or self._last[0] != key:
            # Lightning validates in inference mode. A table made in inference mode could not be
            # used in training afterwards.
            with torch.inference_mode(False):
                self._last = (
                    key,
                    self._table(torch.arange(length, device=like.device)[:, None], like, length),
                )
        return self._last[1]

    def _table(
        self, positions: Tensor, like: Tensor, lengths: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions [s, b or 1] in documents of ``lengths``."""
        angles = positions.float()[..., None] * self._frequencies(lengths, like.device)
        factor = 1.0 if self.scaling is None else self.scaling.sharpness
        return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)

    def _frequencies(self, lengths: Tensor | int, device: torch.device) -> Tensor:
        """Return the frequencies [r/2], or with lengths as a tensor [..., r/2]."""
        scaling, is_long = self.scaling, False
        if scaling is not None and scaling.rope_type == "longrope":
            if isinstance(lengths, Tensor):
                short, long = (
                    inverse_frequencies(self.rotary_dim, self.base, scaling, device, is_long=kind)
                    for kind in (False, True)
                )
                return torch.where((lengths > scaling.original_length)[..., None], long, short)
            is_long = lengths > scaling.original_length
        return inverse_frequencies(self.rotary_dim, self.base, scaling, device, is_long=is_long)


def _sequence_dim(x: Tensor) -> int:
    """Return the memory dim of the sequence in queries, keys or values [s, b, ..., d].

    On a CPU the sequence of a head is contiguous. Elementwise loops run over the sequence and half
    of a head, two nested dims at a time. Half of a head alone is a short loop. A GPU's kernels
    read, and return contexts, batch-first.
    """
    return -2 if x.device.type == "cpu" else 1


def attention_layout(x: Tensor) -> Tensor:
    """Return values [s, b, ..., d] in the memory layout of rotated queries and keys, so that the
    tensor behind the view can be freed.
    """
    dim = _sequence_dim(x)
    return x if torch.compiler.is_compiling() else x.movedim(0, dim).contiguous().movedim(dim, 0)


class _Rotation(torch.autograd.Function):
    """Rotated pairs of channels, written once in the fastest layout for attention kernels.

    The gradient is the rotation by the negative angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        dim = _sequence_dim(x)
        out = x.new_empty(x.movedim(0, dim).shape).movedim(dim, 0)
        half = cosines.shape[-1]
        sizes = [half, half, x.shape[-1] - 2 * half]
        first, second, plain_channels = torch.split(x, sizes, dim=-1)
        out_first, out_second, out_rest = torch.split(out, sizes, dim=-1)
        torch.mul(first, cosines, out=out_first).addcmul_(second, sines, value=-1.0)
        torch.mul(second, cosines, out=out_second).addcmul_(first, sines)
        out_rest.copy_(plain_channels)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        turned: Tensor = _Rotation.apply(grad, cosines, -sines)  # type: ignore[no-untyped-call]
        return turned, None, None


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return queries or keys ``x`` [s, b, ..., d] with the first r channels rotated.

    Cosines and sines are [s, b or 1, r/2].

    A frequency rotates a pair of channels: i and i + r/2, or, ``interleaved``, 2i and 2i + 1. The
    result has the pairs at i and i + r/2 in both cases. The order of channels does not change any
    product of a query and a key.
    """
    shape = (*cosines.shape[:2], *(1,) * (x.ndim - 3), cosines.shape[2])
    cosines, sines = cosines.view(shape), sines.view(shape)
    half = cosines.shape[-1]
    num_kept = x.shape[-1] - 2 * half
    if interleaved:
        pairs, plain_channels = torch.split(x, [2 * half, num_kept], dim=-1)
        first, second = pairs.view(*pairs.shape[:-1], half, 2).unbind(-1)
    elif torch.compiler.is_compiling():
        first, second, plain_channels = torch.split(x, [half, half, num_kept], dim=-1)
    else:
        turned: Tensor = _Rotation.apply(x, cosines, sines)  # type: ignore[no-untyped-call]
        return turned
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat((*rotated, plain_channels) if plain_channels.shape[-1] else rotated, dim=-1)
