"""Attention by torch's FlexAttention: windows, documents and soft caps are functions that the
compiler puts into one kernel.

GPUs compile the kernel. CPUs compute it in plain products, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lightning import compat
from megatron_lightning.layers.attention.sequence_info import SequenceInfo


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: SequenceInfo,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Map queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s, d].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        sequence: Visible keys of each query.
        scale: Factor of the scores.
        softcap: Cap of the scores. None: no cap.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Callable[..., Any] = flex_attention
    make_mask: Callable[..., Any] = create_block_mask
    if q.is_cuda and not torch.compiler.is_compiling():
        attend, make_mask = _compiled()
    documents = sequence.documents
    num_rows = None if documents is None else len(q)
    visible = _visible(sequence, q)
    mask = None
    if visible is not None:
        mask = make_mask(visible, num_rows, None, q.shape[2], k.shape[2], q.device)
    if not q.is_cuda:  # refused for inputs that require gradients, even if none are computed
        q, k, v = q.detach(), k.detach(), v.detach()
    out: Tensor = attend(q, k, v, _cap(softcap), mask, scale, q.shape[1] != k.shape[1])
    return out


def _cap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, *_: softcap * torch.tanh(score / softcap)


def _visible(sequence: SequenceInfo, q: Tensor) -> Callable[..., Tensor] | None:
    """Return whether a query sees a key, from (row, head, query, key). None: every key."""
    window, documents = sequence.window, sequence.documents
    if not sequence.causal and documents is None:
        return None
    numbers: Tensor | None = None
    if documents is not None:
        starts = documents.expanded(len(q)).positions().to(q.device) == 0
        numbers = starts.cumsum(1)

    def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = query - key
        seen = back >= 0 if sequence.causal else back == back  # noqa: PLR0124 (a tensor of True)
        if window is not None:
            seen = seen & (back <= window)
        if numbers is not None:
            seen = seen & (numbers[row, query] == numbers[row, key])
        return seen

    return visible


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's attention and its maker of masks. Compiled, neither stores a value for each
    pair of a query and a key.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return compat.compiled(flex_attention), compat.compiled(create_block_mask)
