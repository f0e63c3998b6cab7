"""Self-attention with a fused projection, grouped queries and rotary positions.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``n`` query heads, ``g`` query groups, ``d`` head
dim. Under tensor parallelism ``n`` and ``g`` count the rank's heads. The code reads both from
tensor shapes, so no count needs rewriting.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import AttentionBackend, TransformerConfig
from megatron_lightning.config.attention_kernels import KERNELS, KernelForm, choose_kernel
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.attention_backend import attend
from megatron_lightning.layers.attention.rotary import (
    RotaryEmbedding,
    apply_rotary,
    attention_layout,
)
from megatron_lightning.layers.attention.sequence_info import SequenceInfo, rotary_places
from megatron_lightning.layers.attention.sequence_mixer import SequenceMixer
from megatron_lightning.layers.context.backends import ContextBackend
from megatron_lightning.layers.context.local import LocalAttention
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.engine import Engine
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.layers.state.key_cache import AttentionForm, CacheStep


class CoreAttention(SequenceMixer):
    """Scaled dot product attention, by torch's fused kernels or over the context-parallel ranks
    bound by the style ``ContextAttention``.

    Args:
        dropout: Dropout probability of the attention weights.
        in_fp32: Compute scores, softmax and context in fp32, under autocast as well.
        backend: Torch's kernels to use. "auto": torch chooses.
        window: Number of earlier positions visible to a query. None: as in the sequence.
        softcap: Scores x become softcap tanh(x / softcap). None: unchanged.
        num_sinks: Number of heads with a learned score of a key without a value, visible to all
            queries (https://arxiv.org/abs/2309.17453, section 3.3). 0: no such keys.
    """

    kind: ClassVar[str] = "attention"
    engine: Engine | None = None
    """Computes attention over the sequences accepted by :meth:`Engine.takes`."""

    def __init__(
        self,
        dropout: float,
        *,
        in_fp32: bool = False,
        backend: AttentionBackend = "auto",
        window: int | None = None,
        softcap: float | None = None,
        num_sinks: int = 0,
    ) -> None:
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.zeros(num_sinks)) if num_sinks else None
        """[n] scores of the sinks, by Megatron-Core's name."""
        self.dropout = Dropout(dropout)
        self.in_fp32 = in_fp32
        self.backend = backend
        self.window = window
        self.softcap = softcap
        self.cp_comm: ContextBackend | None = None
        """Attention over the ranks that share a sequence. None: every rank has full sequences."""
        self.num_context_ranks = 1
        """Ranks that share a sequence."""
        self.cp_comm_type: str | None = None
        """Communication of :attr:`cp_comm`: p2p, all_gather, a2a or a2a+p2p."""

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks share the sequences."""
        return self.cp_comm is not None

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are products of queries and keys alone, as all kernels compute them."""
        return self.softcap is None and self.softmax_offset is None

    @property
    def in_blocks(self) -> bool:
        """Whether torch's function cannot compute the attention: it has no windows, caps and sinks,
        and some kernels are not among its own.
        """
        is_torchs = self.backend == "auto" or KERNELS[self.backend].by_torch
        return self.window is not None or not self.has_plain_scores or not is_torchs

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sequence: SequenceInfo | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Map queries [s, b, n, d], keys [s, b, g, d] and values [s, b, g, e] to contexts [s, b,
        n*e].

        If d and e differ, zeros pad the smaller heads. Kernels that save the log-sum-exp of the
        scores, or do not store the scores, take heads of one size.

        Args:
            q: Queries.
            k: Keys. With ``sequence.cache``: keys of new tokens.
            v: Values. None: the keys serve as values. Only allowed with ``sequence.cache``.
            sequence: Visibility of keys. None: causal.
            scale: Factor of the scores. None: d^-1/2.

        Raises:
            ConfigError: If the backend cannot compute the attention.
        """
        sequence = sequence or SequenceInfo()
        if self.window is not None:
            sequence = sequence.with_window(self.window)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        if sequence.cache is not None:
            return self._attend_cached(q, k, v, sequence, sequence.cache, scale)
        # Latent attention stores one tensor for keys and values, which only the cache can split.
        if v is None:
            raise ConfigError("attention without a cache needs values. Pass v.")
        if self.engine is not None and self.engine.takes(q, sequence):
            return self.engine(q, k, v, sequence, scale)
        size = v.shape[3]
        q, k, v = with_equal_heads(q, k, v)
        # Autocast would cast the inputs down again.
        if self.in_fp32:
            with torch.autocast(q.device.type, enabled=False):
                out = self._attend(q.float(), k.float(), v.float(), sequence, scale).to(v.dtype)
        else:
            out = self._attend(q, k, v, sequence, scale)
        return (out if out.shape[3] == size else out[..., :size]).flatten(2)

    def _attend_cached(  # noqa: PLR0917 (the arguments of forward)
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sequence: SequenceInfo,
        cache: CacheStep,
        scale: float,
    ) -> Tensor:
        """Return contexts [T, 1, n*e] of new tokens over the keys of their requests.

        If ``v`` is None, keys serve as values. Ranks do not share the row, and dropout is only for
        training.

        Raises:
            ConfigError: If queries would see later keys, or documents share a request.
        """
        if not sequence.causal or sequence.documents is not None:
            raise ConfigError(
                "a cache of keys is for causal attention over one document a request. Leave causal "
                "True and documents None."
            )
        if torch.is_autocast_enabled(q.device.type) and not self.in_fp32:
            dtype = torch.get_autocast_dtype(q.device.type)  # as torch's own attention does
            q, k, v = q.to(dtype), k.to(dtype), None if v is None else v.to(dtype)
        form = AttentionForm(
            scale, sequence.window, self.in_fp32, self.softcap, self.softmax_offset
        )  # fmt: skip
        return cache.attend(self, q, k, v, form).flatten(2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float
    ) -> Tensor:
        """Return contexts [s, b, n, d] of queries, keys and values with equal heads."""
        q_bnsd, k_bgsd, v_bgsd = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if self.cp_comm is not None or self.in_blocks or not sequence.is_plain:
            if torch.is_autocast_enabled(q.device.type):  # as torch's own attention does
                dtype = torch.get_autocast_dtype(q.device.type)
                q_bnsd, k_bgsd, v_bgsd = (x.to(dtype) for x in (q_bnsd, k_bgsd, v_bgsd))
            self._check_cp_comm(sequence)
            attention = self.cp_comm or LocalAttention()
            out = attention(
                q_bnsd,
                k_bgsd,
                v_bgsd,
                sequence,
                scale,
                backend=self.backend,
                softcap=self.softcap,
                sink=self.softmax_offset,
            )
            return out.permute(2, 0, 1, 3)
        # Attention without blocks, windows and documents: torch's own kernels, with their dropout.
        run = self._attend_in_stream if self.dropout.draws_from_stream else attend
        out = run(
            q_bnsd,
            k_bgsd,
            v_bgsd,
            backend=self.backend,
            dropout_p=self.dropout.active_p,
            causal=sequence.causal,
            scale=scale,
        )
        return out.permute(2, 0, 1, 3)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_in_stream(self, *inputs: Tensor, **arguments: Any) -> Tensor:
        """Call :func:`attend` outside of graphs.

        No graph may change a generator's state, and a graph that draws the dropout mask itself
        would hold all scores.
        """
        with self.dropout.stream():
            return attend(*inputs, **arguments)

    def check_positions(self, sequence: SequenceInfo | None) -> None:
        """Check that a rank knows the positions of its tokens.

        Raises:
            ConfigError: If ranks share the sequence, and no positions are passed.
        """
        if self.cp_comm is not None and (sequence is None or sequence.position_ids is None):
            raise ConfigError(
                "each rank holds a part of every sequence, and the model was not given its "
                "positions. Call the model of the sharding plan, whose calls in a step are given "
                "them, or pass position_ids that the batch has and sequence_dims declare."
            )

    def kernel_form(self, sequence: SequenceInfo | None = None) -> KernelForm:
        """Return the attention that kernels compute, on any device and in any dtype.

        Args:
            sequence: Visibility of keys. None: one document in a row.
        """
        return KernelForm(
            dropout=self.dropout.active_p,
            window=self.window if sequence is None else sequence.window,
            softcap=self.softcap,
            has_sinks=self.softmax_offset is not None,
            has_documents=sequence is not None and sequence.documents is not None,
            num_context_ranks=self.num_context_ranks,
        )

    def _check_cp_comm(self, sequence: SequenceInfo) -> None:
        if self.dropout.active_p:
            choose_kernel(self.backend, self.kernel_form(sequence))
        self.check_parts()
        self.check_deal(sequence)


def with_equal_heads(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [..., d] padded with zeros to the largest d."""
    size = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in tensors]


def build_core(config: TransformerConfig) -> CoreAttention:
    """Return the attention of a layer's heads."""
    return CoreAttention(
        config.attention_dropout,
        in_fp32=config.attention_softmax_in_fp32,
        backend=config.attention_backend,
        window=None if config.window_size is None else config.window_size[0],
        softcap=config.attn_logit_softcapping,
        num_sinks=config.num_sinks,
    )


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, attention, projection back.

    The rows of ``linear_qkv`` are ordered by query group: n/g query heads, with
    ``attention_output_gate`` n/g gates, the key head and the value head, each of d rows, as in
    Megatron-Core.

    Args:
        config: Sizes.
        rotary: The model's rotary embedding. None: positions of another kind.
    """

    def __init__(self, config: TransformerConfig, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads_per_group = config.heads_per_group
        self.scale = config.softmax_scale
        self.linear_qkv = nn.Linear(
            config.hidden_size, config.qkv_rows, bias=config.add_bias_linear or config.add_qkv_bias
        )
        self.is_gated = config.attention_output_gate
        queries = (config.heads_per_group * config.head_dim,) * (1 + self.is_gated)
        rows = (*queries, config.head_dim, config.head_dim)
        self.linear_qkv.fused_rows = rows  # type: ignore[assignment]
        q_size, k_size = config.qk_norm_sizes
        self.q_layernorm = build_norm(config, q_size) if q_size else None
        self.k_layernorm = build_norm(config, k_size) if k_size else None
        self.norms_heads_alone = config.qk_layernorm_per_head
        self.rotary = rotary
        self.is_interleaved = config.rotary_interleaved
        self.core_attention = build_core(config)
        projected = config.num_attention_heads * config.head_dim
        self.linear_proj = nn.Linear(projected, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]. ``sequence`` None: causal, at positions 0 to s-1.

        The input may be a sequence shard. The full length is known only after the projection
        gathers the sequence.

        Raises:
            ConfigError: If ranks share the sequence, and no positions are passed.
        """
        self.core_attention.check_positions(sequence)
        q, *gates, k, v = self._projected(hidden)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self._normalized(q, self.q_layernorm), self._normalized(k, self.k_layernorm)
        if self.rotary is not None:
            table = self.rotary(q.shape[0], q, *rotary_places(sequence))
            q, k = (apply_rotary(x, *table, interleaved=self.is_interleaved) for x in (q, k))
            if self.q_layernorm is None:  # a norm keeps the projection's output in any case
                v = attention_layout(v)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        context = self.core_attention(q, k, v, sequence, self.scale)
        for gate in gates:
            context = context * gate.flatten(2).sigmoid()
        out: Tensor = self.linear_proj(context)
        return out

    def _projected(self, hidden: Tensor) -> list[Tensor]:
        """Return queries [s, b, g, n/g, d], gates of the same shape if there are any, keys and
        values [s, b, g, 1, d] as views of one tensor.
        """
        mixed = self.linear_qkv(hidden)
        heads = [self.heads_per_group] * (1 + self.is_gated) + [1, 1]
        mixed = mixed.view(*mixed.shape[:2], -1, sum(heads), self.head_dim)
        return list(mixed.split(heads, dim=3))

    def _normalized(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Normalize queries or keys [s, b, g, n/g, d]: each head, or all of a token together."""
        out: Tensor = norm(x) if self.norms_heads_alone else norm(x.flatten(2)).view(x.shape)
        return out
