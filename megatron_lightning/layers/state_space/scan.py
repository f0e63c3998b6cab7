"""The scan of Mamba-2 in chunks (https://arxiv.org/abs/2405.21060, section 6), in plain torch.

    S_t = exp(a dt_t) S_(t-1) + dt_t x_t B_t^T          y_t = S_t C_t

Inside a chunk the scan is attention without softmax, weighted by the decay between two tokens. A
chunk adds one state to the state at the start of the chunk, and the states of all chunks are
carried the same way: a chunk of chunks is mixed by one GEMM.

Decays between two tokens are exponentials of differences. The mask comes *before* the exponential:
the difference of a masked pair is positive, overflows, and would make the gradient NaN.

Heads of a group share B and C. The heads stay a dim of the products, so B and C are never repeated.

Shapes: ``s`` sequence, ``b`` batch, ``h`` heads, ``p`` channels of a head, ``g`` groups, ``r``
heads of a group, ``n`` channels of B and C, ``k`` chunks, ``l`` and ``m`` tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_AT_ONCE = 32
"""States carried by one GEMM. More states are carried in two levels, because the work grows with
the square."""

StartOf = Callable[[Tensor, Tensor], Tensor]
"""Maps the log decay [b, h] of a segment and the state [b, h, p, n] that the segment adds to the
state [b, h, p, n] at the start of the segment."""


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    documents: Tensor | None = None,
    document_before: Tensor | None = None,
    start: Tensor | StartOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan sequences.

    Args:
        x: [s, b, h, p] inputs.
        dt: [s, b, h] step sizes, not negative.
        a: [h] decay rates, negative.
        b: [s, b, g, n] directions of the inputs in the state.
        c: [s, b, g, n] directions of the outputs.
        chunk: Tokens of a chunk. The result does not depend on the number.
        documents: [s, b or 1] number of each token's document, rising. The state is zero at the
            start of a document. None: a row is one document.
        document_before: [b or 1] number of the document of the last token before the sequence.
            None: the sequence continues the first token's document.
        start: [b, h, p, n] state before the first token, or a function that returns the state.
            None: zero.

    Returns:
        y [s, b, h, p], and the state [b, h, p, n] behind the last token.
    """
    length, (groups, channels) = x.shape[0], b.shape[2:]
    chunk = min(chunk, length)
    num_padding = -length % chunk
    if num_padding:  # tokens with a step of 0 neither decay the state nor add to it
        x, dt, b, c = (_padded(t, num_padding) for t in (x, dt, b, c))
        if documents is not None:
            documents = torch.cat([documents, documents[-1:].expand(num_padding, -1)])
    size, heads = x.shape[1], x.shape[2]
    per_group = heads // groups
    scaled = (x * dt.unsqueeze(-1)).view(-1, chunk, size, groups, per_group, x.shape[3])
    b, c = (t.reshape(-1, chunk, size, groups, channels) for t in (b, c))
    log_decay = (dt * a).view(-1, chunk, size, groups, per_group)
    total_kbgrl = log_decay.permute(0, 2, 3, 4, 1).cumsum(-1)
    ids_kbl = None if documents is None else documents.view(-1, chunk, documents.shape[1]).mT
    # Inside a chunk: attention-like, with decays in the place of a softmax.
    weights = _decays(total_kbgrl, None if ids_kbl is None else ids_kbl[:, :, None, None])
    scores = torch.einsum("klbgn,kmbgn->kbglm", c, b)
    out_inside = torch.einsum("kbgrlm,kmbgrp->klbgrp", scores.unsqueeze(3) * weights, scaled)
    # Across chunks: each adds to the state what its tokens have left at its end.
    to_end = masked_exp(
        total_kbgrl[..., -1:] - total_kbgrl,
        None if ids_kbl is None else (ids_kbl != ids_kbl[..., -1:])[:, :, None, None],
    )
    to_end = to_end.permute(0, 4, 1, 2, 3).unsqueeze(-1)
    added = torch.einsum("kmbgn,kmbgrp->kbgrpn", b, scaled * to_end).flatten(2, 3)
    decays = total_kbgrl[..., -1].flatten(2, 3)
    ids = None if ids_kbl is None else _Documents.of(ids_kbl, document_before)
    ends = carried_states(decays, added, None if ids is None else ids.last)
    first, starts, last = torch.zeros_like(ends[:1]), ends[:-1], ends[-1]
    # A start may be a function of this scan's own result, for ranks that scan at the same time.
    if start is not None:
        since = decays.cumsum(0)
        start_state = start if isinstance(start, Tensor) else start(since[-1], last)
        is_other = None if ids is None else (ids.last != ids.before[:1]).unsqueeze(-1)
        further_states = masked_exp(since, is_other)[..., None, None] * start_state
        first, starts, last = (
            start_state.unsqueeze(0),
            starts + further_states[:-1],
            last + further_states[-1],
        )
    starts = torch.unflatten(torch.cat([first, starts]), 2, (groups, per_group))
    # The state at the start of a chunk belongs to the document before the chunk.
    is_other = None if ids is None else ids.behind_start[:, :, None, None]
    from_start = masked_exp(total_kbgrl, is_other).permute(0, 4, 1, 2, 3).unsqueeze(-1)
    carried = torch.einsum("klbgn,kbgrpn->klbgrp", c, starts)
    y = torch.addcmul(out_inside, carried, from_start).reshape(x.shape)
    return y[:length], last


class _Documents(NamedTuple):
    """Documents of chunks."""

    last: Tensor
    """[k, b or 1] number of the document of each chunk's last token."""
    before: Tensor
    """[k, b or 1] number of the document of the last token before each chunk."""
    behind_start: Tensor
    """[k, b or 1, l] whether a document begins between the chunk's start and the token."""

    @classmethod
    def of(cls, ids_kbl: Tensor, document_before: Tensor | None) -> _Documents:
        """``document_before``: see :func:`chunked_scan`."""
        last = ids_kbl[..., -1]
        first = ids_kbl[:1, :, 0] if document_before is None else document_before.unsqueeze(0)
        documents_before = torch.cat([first.expand_as(last[:1]), last[:-1]])
        return cls(last, documents_before, ids_kbl != documents_before.unsqueeze(-1))


def carried_states(log_decay: Tensor, added: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return the states behind consecutive segments, the first of which starts with zero.

    Args:
        log_decay: [k, b, h] log of the decay over each segment.
        added: [k, b, h, p, n] state that each segment alone leaves behind.
        documents: [k, b or 1] number of the document of each segment's last token. States of other
            documents vanish. None: a row is one document.

    Returns:
        [k, b, h, p, n].
    """
    number = len(added)
    if number <= _MOST_AT_ONCE:
        total = log_decay.movedim(0, -1).cumsum(-1)
        ids = None if documents is None else documents.mT[:, None]
        weights = _decays(total, ids)  # [b, h, k, k]
        return torch.einsum("bhlm,mbhpn->lbhpn", weights, added)
    per_block = _MOST_AT_ONCE
    num_padding = -number % per_block
    if num_padding:
        log_decay, added = _padded(log_decay, num_padding), _padded(added, num_padding)
        if documents is not None:
            documents = torch.cat([documents, documents[-1:].expand(num_padding, -1)])
    # Blocks of segments stand side by side in the batch.
    size, blocks = added.shape[1], len(added) // per_block

    def beside(t: Tensor) -> Tensor:
        return torch.unflatten(t, 0, (blocks, per_block)).transpose(0, 1).flatten(1, 2)

    def behind(t: Tensor) -> Tensor:
        return torch.unflatten(t, 1, (blocks, -1)).transpose(0, 1)

    wide_ids = None if documents is None else documents.expand(-1, size)
    inner = behind(
        carried_states(
            beside(log_decay), beside(added), None if wide_ids is None else beside(wide_ids)
        )
    )  # [blocks, per_block, b, h, p, n]
    since = torch.unflatten(log_decay, 0, (blocks, per_block)).cumsum(1)
    ids = None if documents is None else torch.unflatten(documents, 0, (blocks, per_block))
    outer = carried_states(since[:, -1], inner[:, -1], None if ids is None else ids[:, -1])
    is_other = None if ids is None else (ids[1:] != ids[:-1, -1:]).unsqueeze(-1)
    carried_further = masked_exp(since[1:], is_other)[..., None, None] * outer[:-1].unsqueeze(1)
    return torch.cat([inner[:1], inner[1:] + carried_further]).flatten(0, 1)[:number]


def _decays(total: Tensor, documents: Tensor | None) -> Tensor:
    """Return the decay from m to l [..., l, m], zero for m > l and for two documents.

    ``total`` [..., l]: sum of the log decays up to l. ``documents``: number of each l's document,
    broadcast to ``total``.
    """
    length = total.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents.unsqueeze(-1) != documents.unsqueeze(-2))
    return masked_exp(total.unsqueeze(-1) - total.unsqueeze(-2), hidden)


def masked_exp(x: Tensor, hidden: Tensor | None) -> Tensor:
    """Return e^x, and 0 where ``hidden``. The mask comes before the exponential: a large x behind
    the mask would make gradients NaN.
    """
    return (x if hidden is None else x.masked_fill(hidden, -torch.inf)).exp()


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])
