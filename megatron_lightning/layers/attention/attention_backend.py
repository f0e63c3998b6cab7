"""Attention on one device by torch's kernels, chosen by torch or named by the user.

Shapes: queries [b, n, s, d], keys and values [b, g, s, d].
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lightning import compat
from megatron_lightning.config import AttentionBackend
from megatron_lightning.errors import ConfigError

_TORCHS: Mapping[AttentionBackend, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Kernels of the table in ``config/attention_kernels.py`` that torch's function runs."""
KeyMask = Tensor | Literal["causal"] | None
"""Visible keys of each query: [s, t] booleans. "causal": as many keys as queries, and no later key
is visible. None: all keys.
"""
_ROWS = 256  # queries with stored scores at a time
_NO_KERNEL = re.compile("No (available kernel|viable backend)")
_NO_REASON = re.compile("not used because|runtime disabled", re.IGNORECASE)
_ORIGIN = re.compile(r"\s*\(Triggered internally.*", re.DOTALL)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: AttentionBackend,
    dropout_p: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the contexts [b, n, s, d].

    Raises:
        ConfigError: If the named backend cannot compute the contexts.
    """
    arguments: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": causal, "scale": scale}
    grouped = q.shape[1] != k.shape[1]
    if backend == "auto":
        return F.scaled_dot_product_attention(q, k, v, **arguments, enable_gqa=grouped)
    try:
        with sdpa_kernel(_TORCHS[backend]):
            return F.scaled_dot_product_attention(q, k, v, **arguments, enable_gqa=grouped)
    except RuntimeError as error:
        if _NO_KERNEL.search(str(error)):
            chosen_backend(q, k, v, backend=backend, dropout_p=dropout_p, causal=causal)
        raise


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: KeyMask,
    scale: float,
) -> Tensor:
    """Return the contexts [b, n, s, e] of queries over t keys and values [b, g, t, e].

    Args:
        q: [b, n, s, d].
        k: [b, g, t, d].
        v: [b, g, t, e].
        mask: Visible keys of each query.
        scale: Factor of the scores.
    """
    heads, groups, length = q.shape[1], k.shape[1], q.shape[2]
    if length == 1 and mask is None:  # the query heads of a group are queries of one key head
        grouped = q.reshape(len(q), groups, -1, q.shape[3])
        out = F.scaled_dot_product_attention(grouped, k, v, scale=scale)
        return out.reshape(len(q), heads, 1, -1)
    mask_values, is_causal = (None, True) if isinstance(mask, str) else (mask, False)
    return F.scaled_dot_product_attention(
        q, k, v, mask_values, is_causal=is_causal, scale=scale, enable_gqa=heads != groups
    )


def attend_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: KeyMask,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Return :func:`attend_masked` of scores in forms unknown to torch's kernels, in fp32.

    Args:
        q: [b, n, s, d].
        k: [b, g, t, d].
        v: [b, g, t, e].
        mask: Visible keys of each query.
        scale: Factor of the scores.
        softcap: Scores x become softcap tanh(x / softcap). None: unchanged.
        sink: [n] score of a further key, with a value of zeros. None: no such key.
    """
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    groups, num_queries, num_keys = k.shape[1], q.shape[2], k.shape[2]
    keys, values = (x.to(score_dtype)[:, :, None] for x in (k, v))
    outputs = []
    # A slice of queries at a time, since scores of all queries would take [s, t] memory for each
    # head.
    for start in range(0, num_queries, _ROWS):
        rows = slice(start, start + _ROWS)
        part = q[:, :, rows].to(score_dtype).unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
        scores = (part * scale) @ keys.mT
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if isinstance(mask, str):
            causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~causal[rows], -torch.inf)
        elif mask is not None:
            scores = scores.masked_fill(~mask[rows], -torch.inf)
        # A sink is one more key without a value: it takes a share of the softmax, and adds nothing.
        if sink is not None:
            column = sink.to(score_dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :num_keys]
        outputs.append((weights @ values).flatten(1, 2))
    return torch.cat(outputs, 2).to(q.dtype)


def chosen_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: AttentionBackend,
    dropout_p: float,
    causal: bool,
) -> str:
    """Return the name of the kernels run by :func:`attend`, or "default" if torch does not report
    its choice.

    Raises:
        ConfigError: If the named backend cannot compute the attention. Carries torch's reasons.
    """
    arguments: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": causal}
    chosen, reasons = _choice(q, k, v, backend, arguments)
    if chosen is not None or backend == "auto":
        return chosen or "default"
    alternatives = [name for name in _TORCHS if _choice(q, k, v, name, arguments)[0] is not None]
    dtype = str(q.dtype).removeprefix("torch.")
    raise ConfigError(
        f"attention_backend is {backend!r}, and torch has no such kernel for {q.shape[1]} query "
        f"heads and {k.shape[1]} key heads of size {q.shape[3]} in {dtype} on "
        f"{q.device.type} with dropout {dropout_p}: {' '.join(reasons)} Set it to auto, or to one "
        f"that can: {', '.join(alternatives)}."
    )


def _choice(
    q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, arguments: Mapping[str, Any]
) -> tuple[str | None, list[str]]:
    """Return the kernels chosen by torch, or None if there are none, and torch's reasons."""
    only: AbstractContextManager[None] = (
        nullcontext() if backend == "auto" else sdpa_kernel(_TORCHS[backend])
    )
    with warnings.catch_warnings(record=True) as caught, only:
        warnings.simplefilter("always")
        try:
            number = compat.attention_choice(q, k, v, **arguments)
        except RuntimeError as error:
            said = [_ORIGIN.sub("", str(warning.message)) for warning in caught]
            reasons = [text for text in dict.fromkeys(said) if not _NO_REASON.search(text)]
            return None, reasons or [str(error)]
    names = {kernel.value: name for name, kernel in _TORCHS.items()}
    return names.get(number, "default"), []
