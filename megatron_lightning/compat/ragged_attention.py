"""Flash attention of ragged rows of queries on GPUs: over ragged keys, and over pages of keys.

Shapes: ``T`` queries of ``r`` requests one after the other, ``n`` query heads, ``g`` key heads,
``d`` size of a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_FIRST_WITH_PAGES = "2.13"
"""First version with flash attention 2 over pages. torch 2.12 has the arguments, and refuses them
without flash attention 3 (https://github.com/pytorch/pytorch/pull/176905)."""


@cache
def _kernel() -> Any:
    # Imported at the first call: the import takes as long as torch's own, and most runs need none.
    from torch.nn.attention.varlen import varlen_attn as kernel

    return kernel


def varlen_attn(*args: Any, **options: Any) -> Any:
    """Call torch's kernel."""
    return _kernel()(*args, **options)


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(_kernel()).parameters)


def reads_pages() -> bool:
    """Return whether torch's kernel reads pages in place.

    Flash attention 2 of CUDA does, from torch 2.13 on, and needs boundaries of keys beside pages.
    Flash attention 3 refuses the boundaries: if a user activates another kernel, keys are gathered.
    """
    if TorchVersion(torch.__version__) < _FIRST_WITH_PAGES or torch.version.hip is not None:
        return False
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl() in (None, "FA2")


@dataclass(frozen=True)
class RaggedRows:
    """Boundaries of requests in a ragged row of queries, and in a ragged row of keys."""

    boundaries: Tensor
    """[r + 1] int32 first query of each request, and the end."""
    key_boundaries: Tensor
    """[r + 1] int32 first key of each request, and the end. Over pages: sums of the numbers of
    keys, from 0."""
    longest: int
    """Queries of the request with the most."""
    most_keys: int
    """Keys of the request with the most."""


def attend_ragged(
    q: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, *, scale: float, window: int
) -> Tensor:
    """Return causal contexts [T, n, d] of queries over ragged keys.

    Args:
        q: [T, n, d].
        keys: [all keys, g, d]. The last query of a request sees the last key.
        values: [all keys, g, d].
        rows: The requests.
        scale: Factor of the scores.
        window: Number of earlier positions visible to a query. -1: all.
    """
    return _attend(q, keys, values, rows, scale=scale, window_size=(window, 0))


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: RaggedRows,
    *,
    table: Tensor,
    num_keys: Tensor,
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
        rows: The requests.
        table: [r, most pages] int32 pages of each request.
        num_keys: [r] int32 keys of each request.
        scale: Factor of the scores.
        window: Number of earlier positions visible to a query. -1: all.
    """
    pages = {"block_table": table, "seqused_k": num_keys, "num_splits": 1}
    return _attend(q, keys, values, rows, scale=scale, window_size=(window, 0), **pages)


def _attend(q: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, **options: Any) -> Tensor:
    if "enable_gqa" in _parameters():  # before, the kernel took groups without asking
        options["enable_gqa"] = q.shape[1] != keys.shape[-2]
    ends = (rows.boundaries, rows.key_boundaries)
    out: Any = varlen_attn(q, keys, values, *ends, rows.longest, rows.most_keys, **options)
    result: Tensor = out
    return result
