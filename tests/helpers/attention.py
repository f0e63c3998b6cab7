"""Attention as its definition says."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> Tensor:
    """Return causal contexts [q, n, d] of one request in fp64.

    Args:
        q: [q, n, d], the last queries of the request.
        k: [k, g, d].
        v: [k, g, d].
        scale: Factor of the scores.
        window: Number of earlier positions visible to a query. -1: all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    places = torch.arange(len(k), device=q.device)
    back = places[len(k) - len(q) :, None] - places
    hidden = back < 0
    if window >= 0:
        hidden |= back > window
    scores = torch.einsum("qnd,knd->nqk", q.double(), k) * scale
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
