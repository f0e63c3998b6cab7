"""The mixer of Mamba-2 (https://arxiv.org/abs/2405.21060).

Shapes: ``s`` sequence, ``b`` batch, ``h`` heads, ``p`` channels of a head, ``d`` = h p channels of
all heads, ``g`` groups of heads with common B and C, ``n`` channels of B and C.

    hidden -- in_proj --+- z [d] --------------------------------------------+
                        +- x, B, C [d + 2 g n] -- conv1d -- silu -- scan --- norm -- out_proj
                        +- dt [h] -- softplus(dt + dt_bias) --------+

From the convolution to the norm everything is computed in at least fp32, and computed again in
backward: only the output of ``in_proj`` is kept.

Under tensor parallelism a rank has heads and groups, and each of z, x, B, C and dt is sharded by
itself (:class:`MambaHeads`). Sizes are read from the parameters, so no count needs rewriting. Under
context parallelism ranks exchange states (:mod:`.segments`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import MambaConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.state.key_cache import CacheStep
from megatron_lightning.layers.state.state_store import mix_requests
from megatron_lightning.layers.state_space.convolution import CausalConvolution, wide
from megatron_lightning.layers.state_space.gated_norm import GatedNorm
from megatron_lightning.layers.state_space.initial import fill_initial
from megatron_lightning.layers.state_space.kernel import fused_scan, uses_kernel
from megatron_lightning.layers.state_space.mixer import StateMixer
from megatron_lightning.layers.state_space.row_documents import token_documents
from megatron_lightning.layers.state_space.scan import chunked_scan
from megatron_lightning.layers.state_space.segments import Segments
from megatron_lightning.layers.state_space.shared_groups import SharedGroups


class MambaMixer(StateMixer):
    """Projection, convolution, scan, gated norm, projection back.

    Args:
        config: Sizes of the model.
        mamba: Sizes of the mixer.
    """

    kind = "Mamba-2"
    precise = ("A_log", "D", "dt_bias")
    shared_groups: SharedGroups | None = None
    """Tensor-parallel ranks that share groups. None: a rank has full groups."""

    def __init__(self, config: TransformerConfig, mamba: MambaConfig) -> None:
        super().__init__()
        sizes, h = mamba.sizes(config.hidden_size), config.hidden_size
        self.mamba = mamba
        precise = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(sizes.heads, dtype=precise))
        self.D = nn.Parameter(torch.empty(sizes.heads, dtype=precise))
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads, dtype=precise))
        self.in_proj = nn.Linear(h, sum(sizes.in_parts), bias=False)
        self.in_proj.fused_rows = sizes.in_parts  # type: ignore[assignment]
        self.conv1d = CausalConvolution(sum(sizes.conv_parts), mamba.conv_kernel)
        self.norm = GatedNorm(sizes.inner, sizes.groups, config.layernorm_epsilon)
        self.out_proj = nn.Linear(sizes.inner, h, bias=False)
        for name in self.precise:
            fill_initial(name, getattr(self, name))

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]. ``sequence`` None: rows are single documents.

        The input may be a sequence shard of tensor-parallel ranks. ``in_proj`` gathers the shards.

        Raises:
            ConfigError: If context-parallel ranks share sequences, and this sequence is full.
        """
        self.check_parts()
        self.check_deal(sequence)
        projected = self.in_proj(hidden)
        documents = None if sequence is None else sequence.documents
        if sequence is not None and sequence.cache is not None:
            mixed = self._mix_cached(projected, sequence.cache)
        elif self.mamba.recompute_scan and torch.is_grad_enabled():
            mixed = checkpoint(
                self._mix, projected, documents, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = self._mix(projected, documents)
        out: Tensor = self.out_proj(mixed)
        return out

    def _mix(self, projected: Tensor, documents: Documents | None) -> Tensor:
        """Map the output of ``in_proj`` to the input of ``out_proj`` [s, b, d]."""
        with torch.autocast(projected.device.type, enabled=False):
            gate, mixed, dt = self._split_projection(projected)
            if self.context_group is None:
                y = self._mix_rows(mixed, dt, documents)
            else:
                deal = None if documents is None else documents.deal
                y = self._mix_segments(mixed, dt, documents, Segments(self.context_group, deal))
            out: Tensor = self.norm(y, gate)
            return out

    def _split_projection(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gate [s, b, d], the convolution's input [s, b, d + 2gn] and step sizes [s, b,
        h].
        """
        heads, channels = self.A_log.shape[0], self.conv1d.weight.shape[0]
        sizes = [heads * self.mamba.head_dim, channels, heads]
        gate, mixed, dt = torch.split(projected, sizes, -1)
        return gate, mixed, self._limited(F.softplus(wide(dt) + self.dt_bias))

    def _limited(self, dt: Tensor) -> Tensor:
        """Return step sizes within the limits."""
        low, high = self.mamba.dt_limit
        return dt if (low, high) == (0.0, math.inf) else dt.clamp(low, high)

    def _mix_cached(self, projected: Tensor, step: CacheStep) -> Tensor:
        """Mix new tokens [T, 1, …] of requests. A request keeps the last inputs of the convolution
        [r, k - 1, d + 2gn], and the state [r, h, p, n].
        """
        heads, state = self.A_log.shape[0], self.mamba.state_dim
        empty = (
            projected.new_zeros(1, self.conv1d.kernel - 1, self.conv1d.weight.shape[0]),
            self.A_log.new_zeros(1, heads, self.mamba.head_dim, state),
        )

        def mix(inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
            gate, mixed, dt = self._split_projection(inputs)
            tokens = torch.cat([states[0].transpose(0, 1), mixed])
            convolved = self.conv1d(mixed, tokens[: self.conv1d.kernel - 1])
            x, b, c = self._parts(convolved)
            y, last = chunked_scan(
                x, dt, -self.A_log.exp(), b, c, chunk=self.mamba.chunk_size, start=states[1]
            )
            behind = tokens[len(mixed) :].transpose(0, 1)
            return self.norm(self._with_skip(y, x), gate), (behind, last)

        with torch.autocast(projected.device.type, enabled=False):
            return mix_requests(step, self, projected, empty, mix)

    def _mix_rows(self, mixed: Tensor, dt: Tensor, documents: Documents | None) -> Tensor:
        """Convolve and scan full rows [s, b, d + 2gn]. Returns [s, b, d]."""
        positions = torch.arange(len(mixed), device=mixed.device)
        tokens = token_documents(documents, positions)
        convolved = self.conv1d(mixed, None, None if tokens is None else tokens.positions)
        x, b, c = self._parts(convolved)
        numbers, chunk = None if tokens is None else tokens.numbers, self.mamba.chunk_size
        inputs = (x, dt, -self.A_log.exp(), b, c)
        if uses_kernel(self.mamba.scan_engine, x):
            y = fused_scan(*inputs, chunk=chunk, documents=numbers, dtype=mixed.dtype)
        else:
            y, _ = chunked_scan(*inputs, chunk=chunk, documents=numbers)
        return self._with_skip(y, x)

    def _mix_segments(
        self, mixed: Tensor, dt: Tensor, documents: Documents | None, segments: Segments
    ) -> Tensor:
        """Convolve and scan this rank's n segments [n w, b, d + 2gn] of every row. Returns [n w,
        b, d].
        """
        if self.mamba.scan_engine == "mamba_ssm":
            raise ConfigError(
                "mamba.scan_engine is mamba_ssm, and context-parallel ranks share sequences, whose "
                "segments are scanned by torch. Set scan_engine to auto or torch, or "
                "context_parallel_size to 1."
            )
        length, size, _ = mixed.shape
        of_tokens = segments.documents(documents, length, size, mixed.device)
        mixed, dt = segments.fold(mixed), segments.fold(dt)
        # A causal convolution of width k needs the k - 1 tokens before each segment, which another
        # rank has.
        tokens_before = segments.tokens_before(mixed, self.conv1d.kernel - 1)
        convolved = self.conv1d(
            mixed, tokens_before, None if of_tokens is None else of_tokens.tokens.positions
        )
        x, b, c = self._parts(convolved)
        y, _ = chunked_scan(
            x, dt, -self.A_log.exp(), b, c, chunk=self.mamba.chunk_size,
            documents=None if of_tokens is None else of_tokens.tokens.numbers,
            document_before=None if of_tokens is None else of_tokens.before,
            # Segments are scanned from zero by all ranks at once. The states before them are then
            # added, since the scan is linear in its start.
            start=lambda log_decay, added: segments.start_states(log_decay, added, of_tokens),
        )  # fmt: skip
        return segments.unfold(self._with_skip(y, x))

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [s, b, h, p], B and C [s, b, g, n] of the convolution's output."""
        activated = F.silu(convolved)
        inner = self.A_log.shape[0] * self.mamba.head_dim
        x, bc = torch.split(activated, [inner, activated.shape[-1] - inner], -1)
        bc = torch.unflatten(bc, -1, (2, -1))
        if self.shared_groups is not None:
            bc = self.shared_groups.gather(bc)
        b, c = torch.unflatten(bc, -1, (-1, self.mamba.state_dim)).unbind(2)
        return torch.unflatten(x, -1, (-1, self.mamba.head_dim)), b, c

    def _with_skip(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y + D x [s, b, d] of y and x [s, b, h, p]."""
        return torch.addcmul(y, x, self.D.unsqueeze(-1)).flatten(2)
