"""Attention of full sequences on one rank in forms unknown to torch's public function: windows,
documents that share a row, capped scores and sinks. And by kernels that torch's function lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.config.attention_kernels import KernelForm, choose_kernel
from megatron_lightning.layers.attention.flex_kernel import attend_flex
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup


class LocalAttention:
    """Attention without other ranks. Documents on CUDA use flash attention for variable lengths.

    FlexAttention has kernels of its own. All other inputs are computed block by block.
    """

    def __init__(self) -> None:
        self._blocks = RingAttention(AxisGroup("cp", (0,), 0, None))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: SequenceInfo,
        scale: float,
        *,
        backend: AttentionBackend = "auto",
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Map queries [b, n, s, d], keys and values [b, g, t, d] to outputs [b, n, s, d].

        ``softcap`` and ``sink`` [n]: see :class:`Sharing`.
        """
        form = KernelForm(
            device=q.device.type,
            dtype=str(q.dtype).removeprefix("torch."),
            trained=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
            window=sequence.window,
            softcap=softcap,
            has_sinks=sink is not None,
            has_documents=sequence.documents is not None,
        )
        kernel = choose_kernel(backend, form)
        if kernel == "flash" and form.is_ragged and q.is_cuda:
            return _varlen(q, k, v, sequence, scale)
        if kernel == "flex":
            return attend_flex(q, k, v, sequence=sequence, scale=scale, softcap=softcap)
        return self._blocks(q, k, v, sequence, scale, backend=backend, softcap=softcap, sink=sink)


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes one sequence of tokens with boundaries: every row of a batch is at least one
    # document.
    documents = sequence.documents or Documents(((0, q.shape[2]),))
    rows = documents.expanded(q.shape[0])
    # Boundaries of all rows in one dim. Without documents every row ends its own.
    ends = [row * rows.length + span.stop for row, span in rows.spans()]
    boundaries = torch.tensor([0, *ends], dtype=torch.int32, device=q.device)
    longest = max(len(span) for _, span in rows.spans())
    window = -1 if sequence.window is None else sequence.window
    heads = q.shape[1] // k.shape[1]
    q_tokens, k_tokens, v_tokens = (
        x.transpose(1, 2).flatten(0, 1)
        for x in (q, k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1))
    )
    out = varlen_attn(
        q_tokens,
        k_tokens,
        v_tokens,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(window, 0) if sequence.causal else (-1, -1),
    )
    rows_of_tokens = out[0] if isinstance(out, tuple) else out
    return rows_of_tokens.view(q.shape[0], q.shape[2], *q_tokens.shape[1:]).transpose(1, 2)
