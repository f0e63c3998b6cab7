"""Mixer of gated delta net (https://arxiv.org/abs/2412.06464), as in Qwen3-Next, with
Megatron-Core's names.

    q, k, v, z, beta, alpha = in_proj(x)            q, k, v = silu(conv1d(q, k, v))
    o = delta rule of q / |q| / sqrt(d), k / |k|, v with
        decay e^(-exp(A_log) softplus(alpha + dt_bias)) and beta = sigmoid(beta)
    y = out_proj(RMSNorm(o) silu(z))                the norm of each value head, one weight for all

The rows of ``in_proj`` are **[q | k | v | z | beta | alpha]**, and the channels of ``conv1d``
[q | k | v], each part ordered by heads. ``transformers`` orders the rows of ``in_proj_qkvz`` by key
head, each with [q | k | the v of its value heads | the z of its value heads], and the rows of
``in_proj_ba`` by key head, each with [the beta of its value heads | the alpha of its value heads]:

    q, k, v, z  = in_proj_qkvz.view(g, 2 d + 2 r e, hidden).split([d, d, r e, r e], 1)
    beta, alpha = in_proj_ba.view(g, 2 r, hidden).split([r, r], 1)
    in_proj     = cat([part.flatten(0, 1) for part in (q, k, v, z, beta, alpha)])

``conv1d``, ``A_log``, ``dt_bias`` and ``out_proj`` are equal in both, and ``out_norm`` is named
``norm`` there. Unlike other norms of Qwen3-Next, ``out_norm`` is not zero-centered.

Tensor-parallel ranks divide every part by heads. The norm's weight serves the heads of all ranks,
so the weight's gradient is a sum over the ranks, with and without sequence parallelism.
Context-parallel ranks exchange tokens for heads before the convolution, and back after the delta
rule (``exchange.py``). The gates z stay.

Shapes: ``s`` sequence, ``b`` batch, ``h`` value heads, ``g`` key heads, ``r`` value heads of a key
head, ``d`` channels of a key, ``e`` channels of a value. Under tensor parallelism ``h`` and ``g``
count the rank's heads. The code reads both from tensor shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import DeltaNetConfig, TransformerConfig
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.state.key_cache import CacheStep
from megatron_lightning.layers.state.state_store import mix_requests
from megatron_lightning.layers.state_space.convolution import (
    CausalConvolution,
    causal_convolution,
    wide,
)
from megatron_lightning.layers.state_space.delta_kernel import load_kernel
from megatron_lightning.layers.state_space.delta_rule import delta_rule
from megatron_lightning.layers.state_space.exchange import (
    heads_to_part,
    parts_to_heads,
    repeated_heads,
    share_of,
)
from megatron_lightning.layers.state_space.initial import fill_initial
from megatron_lightning.layers.state_space.mixer import StateMixer
from megatron_lightning.layers.state_space.row_documents import TokenDocuments, token_documents

_LENGTH_EPS = 1e-6  # below the squared length of a query or key, as in all implementations


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head, times silu of a gate.

    Args:
        size: Channels of a head.
        eps: Added to the mean of the squares.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate [..., size] to [..., size] in at least fp32."""
        x = wide(x)
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return wide(self.weight) * normed * F.silu(wide(gate))


class GatedDeltaNet(StateMixer):
    """Mixer of gated delta net.

    Args:
        config: The model.
        delta_net: Sizes of the mixer.
    """

    kind = "gated delta net"
    precise = ("dt_bias", "A_log")

    def __init__(self, config: TransformerConfig, delta_net: DeltaNetConfig) -> None:
        super().__init__()
        self.sizes = delta_net
        width, heads = config.hidden_size, delta_net.num_value_heads
        precise = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=precise))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=precise))
        fill_initial("A_log", self.A_log)
        self.in_proj = nn.Linear(width, sum(delta_net.in_parts), bias=False)
        self.in_proj.fused_rows = delta_net.in_parts  # type: ignore[assignment]
        self.conv1d = CausalConvolution(
            sum(delta_net.conv_parts), delta_net.conv_kernel_dim, bias=False
        )
        self.out_norm = GatedHeadNorm(delta_net.value_head_dim, eps=config.layernorm_epsilon)
        self.out_proj = nn.Linear(delta_net.value_width, width, bias=False)
        self.kernel = load_kernel() if delta_net.kernel == "auto" else None
        """Fused delta rule for the inputs that the kernel takes. None: the delta rule in torch."""

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]. The input may be a sequence shard.

        Raises:
            ConfigError: If context-parallel ranks share sequences, and this sequence is full.
        """
        self.check_parts()
        self.check_deal(sequence)
        documents = None if sequence is None else sequence.documents
        mixed: Tensor = self.in_proj(hidden)
        if sequence is not None and sequence.cache is not None:
            cached: Tensor = self.out_proj(self._mix_cached(mixed, sequence.cache))
            return cached
        *inputs, gates, beta, alpha = torch.split(mixed, self._widths(mixed), -1)
        parts = [*inputs, beta, alpha]
        # Ranks of a context group exchange: from a part of the sequence with all heads to the full
        # sequence with a part of the heads, since the recurrence runs along the sequence.
        group, deal = self.context_group, None if sequence is None else sequence.deal
        if group is not None:
            keys = self._num_key_heads
            copies = max(1, group.size // keys)
            parts[:2] = [repeated_heads(part, keys, copies) for part in parts[:2]]
            parts = parts_to_heads(parts, group, deal)
        tokens = token_documents(documents, torch.arange(len(parts[0]), device=mixed.device))
        # The intermediate values of a scan are many times its inputs, and are computed again in
        # backward.
        out = self._recomputed(self._mix, parts, tokens, mixed.dtype)
        if group is not None:
            out = heads_to_part(out, group, deal)
        out = self._recomputed(self._normed, out, gates)
        result: Tensor = self.out_proj(out)
        return result

    @property
    def _num_key_heads(self) -> int:
        """Key heads of this rank (g)."""
        return self.A_log.shape[0] // self.sizes.values_per_key

    def _widths(self, mixed: Tensor) -> list[int]:
        """Return this rank's widths of the parts of ``in_proj``."""
        full_parts = self.sizes.in_parts
        return [part * mixed.shape[-1] // sum(full_parts) for part in full_parts]

    def _recomputed(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function of tensors, and call it again in backward instead of keeping its
        intermediate tensors.
        """
        if not (self.sizes.recompute_scan and torch.is_grad_enabled()):
            return function(*args)
        out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return out

    def _mix(
        self, parts: list[Tensor], tokens: TokenDocuments | None, dtype: torch.dtype
    ) -> Tensor:
        """Map queries, keys, values, beta and alpha [s, b, ...] to outputs [s, b, h e]."""
        *inputs, beta, alpha = parts
        documents, positions = (None, None) if tokens is None else tokens
        with torch.autocast(beta.device.type, enabled=False):
            weight, a_log, dt_bias = self._mixed_weights()
            mixed = causal_convolution(torch.cat(inputs, -1), weight, None, None, positions)
            q, k, v = self._heads(mixed, [part.shape[-1] for part in inputs])
            log_decay = -wide(a_log).exp() * F.softplus(wide(alpha) + wide(dt_bias))
            if self.kernel is not None and self.kernel.takes(beta):
                q, k, v = (t.to(beta.dtype) for t in (q, k, v))
                out = self.kernel(q, k, v, log_decay, beta.sigmoid(), documents)
            else:
                chunk = self.sizes.chunk_size
                beta = wide(beta).sigmoid()
                out, _ = delta_rule(q, k, v, log_decay, beta, chunk=chunk, documents=documents)
            return out.flatten(2).to(dtype)

    def _heads(self, mixed: Tensor, widths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled queries and keys [s, b, g, d] and values [s, b, h, e] of the convolution's
        output.
        """
        q, k, v = torch.split(F.silu(mixed), widths, -1)
        q, k = (_of_length_1(torch.unflatten(t, -1, (-1, self.sizes.key_head_dim))) for t in (q, k))
        v = torch.unflatten(v, -1, (-1, self.sizes.value_head_dim))
        return q * self.sizes.key_head_dim**-0.5, k, v

    def _mix_cached(self, projected: Tensor, step: CacheStep) -> Tensor:
        """Mix new tokens [T, 1, ...] of requests. Returns the gated norm [T, 1, h e] of the
        outputs. A request keeps the last inputs of the convolution, and the state [r, h, d, e].
        """
        sizes, widths, num_before = self.sizes, self._widths(projected), self.conv1d.kernel - 1
        empty = (
            projected.new_zeros(1, num_before, len(self.conv1d.weight)),
            self.A_log.new_zeros(1, len(self.A_log), sizes.key_head_dim, sizes.value_head_dim),
        )

        def mix(inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
            q, k, v, gates, beta, alpha = torch.split(inputs, widths, -1)
            new_tokens = torch.cat([q, k, v], -1)
            tokens = torch.cat([states[0].transpose(0, 1), new_tokens])
            mixed = causal_convolution(new_tokens, self.conv1d.weight, None, tokens[:num_before])
            log_decay = -wide(self.A_log).exp() * F.softplus(wide(alpha) + wide(self.dt_bias))
            out, last = delta_rule(
                *self._heads(mixed, widths[:3]), log_decay, wide(beta).sigmoid(),
                chunk=sizes.chunk_size, start=states[1],
            )  # fmt: skip
            normed = self._normed(out.flatten(2).to(inputs.dtype), gates)
            return normed, (tokens[len(new_tokens) :].transpose(0, 1), last)

        with torch.autocast(projected.device.type, enabled=False):
            return mix_requests(step, self, projected, empty, mix)

    def _mixed_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the convolution's weight, A_log and dt_bias of the heads that this rank mixes."""
        weight, group = self.conv1d.weight, self.context_group
        if group is None:
            return weight, self.A_log, self.dt_bias
        keys = self._num_key_heads
        full_parts = self.sizes.conv_parts
        q, k, v = torch.split(
            weight, [part * len(weight) // sum(full_parts) for part in full_parts]
        )
        copies = max(1, group.size // keys)
        q, k = (repeated_heads(part, keys, copies, dim=0) for part in (q, k))
        weight_share = torch.cat([share_of(part, group) for part in (q, k, v)])
        return weight_share, share_of(self.A_log, group), share_of(self.dt_bias, group)

    def _normed(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return the gated norm of outputs [s, b, h e]."""
        heads = (-1, self.sizes.value_head_dim)
        normed: Tensor = self.out_norm(*(torch.unflatten(t, -1, heads) for t in (out, gates)))
        return normed.flatten(2).to(out.dtype)


def _of_length_1(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()
