"""Flash attention of ragged rows of queries on GPUs: over ragged keys, and over pages of keys.

Shapes: ``T`` queries of ``r`` requests one after the other, ``n`` query heads, ``g`` key heads,
``d`` size of a head.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.torch_version import TorchVersion

_FIRST_WITH_PAGES = "2.13"
"""First version with flash attention 2 over pages. torch 2.12 has the arguments, and refuses them
without flash attention 3 (https://github.com/pytorch/pytorch/pull/176905)."""


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen_attn).parameters)


def reads_pages() -> bool:
    """Return whether torch's kernel reads pages in place.

    Flash attention 2 of CUDA does, from torch 2.13 on, and needs boundaries of keys beside pages.
    Flash attention 3 refuses the boundaries: if a user activates another kernel, keys are gathered.
    """
    if TorchVersion(torch.__version__) < _FIRST_WITH_PAGES or torch.version.hip is not None:
        return False
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl() in (None, "FA2")


def attend_ragged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    boundaries: Tensor,
    key_boundaries: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
) -> Tensor:
    """Return causal contexts [T, n, d] of queries over ragged keys.

    Args:
        q: [T, n, d].
        keys: [all keys, g, d]. The last query of a request sees the last key.
        values: [all keys, g, d].
        boundaries: [r + 1] int32 first query of each request, and the end.
        key_boundaries: [r + 1] int32 first key of each request, and the end.
        longest: Queries of the request with the most.
        most_keys: Keys of the request with the most.
        scale: Factor of the scores.
        window: Number of earlier positions visible to a query. -1: all.
    """
    return _attend(
        q, keys, values, boundaries, key_boundaries, longest, most_keys, scale, window, {}
    )


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    table: Tensor,
    num_keys: Tensor,
    boundaries: Tensor,
    key_boundaries: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
) -> Tensor:
    """Return :func:`attend_ragged` over pages. Only where :func:`reads_pages`.

    Keys are not divided among thread blocks (``num_splits=1``): the division depends on other
    requests.

    Args:
        q: [T, n, d].
        keys: [pages, page size, g, d].
        values: [pages, page size, g, d].
        table: [r, most pages] int32 pages of each request.
        num_keys: [r] int32 keys of each request.
        boundaries: [r + 1] int32 first query of each request, and the end.
        key_boundaries: [r + 1] int32 sums of ``num_keys``, from 0.
        longest: Queries of the request with the most.
        most_keys: Keys of the request with the most.
        scale: Factor of the scores.
        window: Number of earlier positions visible to a query. -1: all.
    """
    options = {"block_table": table, "seqused_k": num_keys, "num_splits": 1}
    return _attend(
        q, keys, values, boundaries, key_boundaries, longest, most_keys, scale, window, options
    )


def _attend(  # noqa: PLR0917 (the arguments of torch)
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    boundaries: Tensor,
    key_boundaries: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
    options: dict[str, Any],
) -> Tensor:
    if "enable_gqa" in _parameters():  # before, the kernel took groups without asking
        options = {**options, "enable_gqa": q.shape[1] != keys.shape[-2]}
    arguments: Any = (q, keys, values, boundaries, key_boundaries, longest, most_keys)
    out: Any = varlen_attn(*arguments, scale=scale, window_size=(window, 0), **options)
    result: Tensor = out
    return result
