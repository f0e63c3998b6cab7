"""The gated delta rule in chunks (https://arxiv.org/abs/2412.06464, section 3), in plain torch.

    S_t = e^(g_t) (1 - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T          o_t = S_t^T q_t

A token replaces the value that the state has for the token's key. Inside a chunk with the decay
D_lm = e^(g_(m+1) + ... + g_l), the values w_l that the tokens add to the state follow from a
triangular system, in which every token reads what the earlier tokens added:

    (1 + A) w = beta v - beta e^(g_1 + ... + g_l) k S_0          A_lm = beta_l D_lm k_l^T k_m, m < l

The system is solved once for each chunk, with the columns beta v and beta e^(...) k, without S_0.
Then only S_0 is carried from chunk to chunk.

Decays are exponentials of differences. The mask comes *before* the exponential: the difference of a
masked pair is positive, overflows, and would make the gradient NaN.

Value heads that share a key head stay a dim of the products, so keys are never repeated.

Shapes: ``s`` sequence, ``b`` batch, ``h`` value heads, ``g`` key heads, ``r`` value heads of a key
head, ``d`` channels of a key, ``e`` channels of a value, ``k`` chunks, ``l`` and ``m`` tokens of a
chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.state_space.scan import masked_exp

CHUNK = 64
"""Tokens of a chunk, as in flash-linear-attention."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    chunk: int = CHUNK,
    documents: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read and write the state along sequences.

    Args:
        q: [s, b, g, d] queries, scaled.
        k: [s, b, g, d] keys of length 1.
        v: [s, b, h, e] values. Each of the g keys serves h / g consecutive values.
        log_decay: [s, b, h] log of the decay before each token, not positive.
        beta: [s, b, h] share of a key's value that a token replaces.
        chunk: Tokens of a chunk. The result does not depend on the number.
        documents: [s, b or 1] number of each token's document, rising. The state is zero at the
            start of a document. None: a row is one document.
        start: [b, h, d, e] state before the first token, of the first token's document. None: zero.

    Returns:
        o [s, b, h, e], and the state [b, h, d, e] behind the last token, in at least fp32.
    """
    length, size, heads, width = v.shape
    groups, channels = k.shape[2:]
    chunk = min(chunk, length)
    num_padding = -length % chunk
    q, k, v, log_decay, beta = (_in_chunks(t, chunk) for t in (q, k, v, log_decay, beta))
    v_kbgrle, beta, total = (
        torch.unflatten(t, 2, (groups, heads // groups)) for t in (v, beta, log_decay.cumsum(-1))
    )
    # Within a chunk of l tokens the recurrence is a triangular system, solved at once (the WY
    # form): the loop below then runs over chunks and not over tokens.
    decays_inside, from_start, to_end, through = _decays(total, _ids(documents, chunk, num_padding))
    k_kbgld = k.unsqueeze(3)
    weights = beta.unsqueeze(-1) * decays_inside * (k @ k.mT).unsqueeze(3)
    columns = torch.cat(
        [beta.unsqueeze(-1) * v_kbgrle, (beta * from_start).unsqueeze(-1) * k_kbgld], -1
    )
    # The solver reads only entries below the diagonal.
    solved = torch.linalg.solve_triangular(weights, columns, upper=False, unitriangular=True)
    values, reads = torch.split(solved, [width, channels], -1)
    written_keys = to_end.unsqueeze(-1) * k_kbgld
    state = k.new_zeros(size, groups, heads // groups, channels, width)
    if start is not None:
        state = start.to(state.dtype).view_as(state)
    # From chunk to chunk: what the chunk writes is its values less what the state already answers
    # to its keys.
    starts, added = [], []
    for index in range(len(k)):
        starts.append(state)
        added.append(values[index] - reads[index] @ state)
        state = through[index] * state + written_keys[index].mT @ added[-1]
    # Outputs read what the own chunk has added so far, and the state at the chunk's start.
    scores = (q @ k.mT).unsqueeze(3) * decays_inside
    out = scores @ torch.stack(added)
    out = out + (from_start.unsqueeze(-1) * q.unsqueeze(3)) @ torch.stack(starts)
    out_skblbhe = out.flatten(2, 3).permute(0, 3, 1, 2, 4)
    return out_skblbhe.reshape(-1, size, heads, width)[:length], state.flatten(1, 2)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x [s, b, heads, ...] as [k, b, heads, chunk, ...] in at least fp32.

    Zeros fill the last chunk: a token with a beta of 0 writes nothing, and a log decay of 0 keeps
    the state.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, -len(x) % chunk))
    return torch.unflatten(x, 0, (-1, chunk)).movedim(1, 3).contiguous()


def _ids(documents: Tensor | None, chunk: int, missing: int) -> Tensor | None:
    """Return the document numbers of chunks [k, b or 1, 1, 1, l]."""
    if documents is None:
        return None
    if missing:
        documents = torch.cat([documents, documents[-1:].expand(missing, -1)])
    return torch.unflatten(documents, 0, (-1, chunk)).mT[:, :, None, None]


def _decays(total: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the decays of a chunk: from m to l [..., l, m], zero for m > l; from the start to l
    [..., l]; from l to the end [..., l]; over the chunk [..., 1, 1]. Between two documents a decay
    is zero.

    Args:
        total: [k, b, g, r, l] sums of the log decays up to l.
        ids: Document numbers of the tokens [k, b or 1, 1, 1, l].
    """
    length = total.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    is_before = is_later = apart = None
    if ids is not None:
        hidden = hidden | (ids.unsqueeze(-1) != ids.unsqueeze(-2))
        last = ids[..., -1:]
        # The state at the start of a chunk belongs to the document of the token before.
        first = torch.cat([ids[:1, ..., :1], last[:-1]])
        is_before, is_later, apart = ids != first, ids != last, last != first
    end = total[..., -1:]
    return (
        masked_exp(total.unsqueeze(-1) - total.unsqueeze(-2), hidden),
        masked_exp(total, is_before),
        masked_exp(end - total, is_later),
        masked_exp(end, apart).unsqueeze(-1),
    )
