"""Bytes that attention over shared sequences sends and keeps, counted on real ranks and compared
with theory.

Per rank and step, with Q elements in its queries, K in its keys (and in its values), of e bytes
each, w bytes where parts are summed (fp32), and c ranks:

    handed to the network   p2p         2 K (c - 1) (2 e + w)     keys and values twice around the
                                                                  ring, their gradients once
                            all_gather  2 K (2 e + c w)           its part in both directions;
                                                                  gradients of all keys
                            a2a         4 (Q + K) e               queries, keys, values, output;
                                                                  their gradients
                            a2a+p2p     a2a, and p2p of the outer ranks

    live at the peak        see ``expected_peak_bytes``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.live_bytes import NetworkBytes
from benchmarks.ranks import run
from megatron_lightning.config import ContextOptions
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.sequence import SequencePart

PEAK_TOLERANCE = 0.1


class Case(NamedTuple):
    """Causal attention of one layer on several ranks."""

    backend: Any
    num_ranks: int
    heads: int
    groups: int
    dtype: torch.dtype
    length: int
    levels: tuple[int, int] | None = None
    head_size: int = 64

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element where parts are summed."""
        return max(4, self.dtype.itemsize)

    @property
    def queries(self) -> int:
        """Elements in the queries of a rank."""
        return self.heads * self.length // self.num_ranks * self.head_size

    @property
    def keys(self) -> int:
        """Elements in the keys of a rank."""
        return self.groups * self.length // self.num_ranks * self.head_size

    @property
    def exchanged_keys(self) -> int:
        """Elements of the keys in an exchange for heads: repeated where ranks share a head."""
        inner = self.levels[0] if self.levels else self.num_ranks
        return self.keys * math.lcm(self.groups, inner) // self.groups

    @property
    def ring_size(self) -> int:
        """Ranks around which keys and values travel."""
        outer = self.levels[1] if self.levels else 1
        return self.num_ranks if self.backend == "p2p" else outer


class Counted(NamedTuple):
    """Counts of rank 0 in one forward and backward."""

    sent_bytes: dict[str, int]
    """Bytes handed to the network, by collective."""
    peak_bytes: int
    """Most bytes of live tensors at once."""


def count(cases: Sequence[Case]) -> list[Counted]:
    """Run forward and backward of every case on its ranks; return the counts of rank 0."""
    found: dict[Case, Counted] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        together = [case for case in cases if case.num_ranks == num_ranks]
        counts = run(num_ranks, _count_all, together, limit_s=300.0)[0]
        found.update(zip(together, counts, strict=True))
    return [found[case] for case in cases]


def expected_sent_bytes(case: Case) -> int:
    """Return the bytes that a rank hands to the network."""
    e, w, c = case.dtype.itemsize, case.wide_bytes, case.num_ranks
    if case.backend == "all_gather":
        return 2 * case.keys * (2 * e + c * w)
    if case.backend == "p2p":
        return 2 * case.keys * (c - 1) * (2 * e + w)
    exchanged = 4 * (case.queries + case.exchanged_keys) * e
    return exchanged + 2 * case.exchanged_keys * (case.ring_size - 1) * (2 * e + w)


def expected_peak_bytes(case: Case) -> int:
    """Return the most bytes of tensors that are alive at once on rank 0, inputs and gradients
    included; it is in backward. Rings: of one or two ranks.
    """
    e, w = case.dtype.itemsize, case.wide_bytes
    q, k = case.queries, case.keys
    log_sum = w * q // case.head_size
    inputs, output, gradient = (q + 2 * k) * e, q * e, q * e
    held = inputs + output + log_sum + gradient + q * w  # q * w: sum of the gradients of queries
    if case.backend == "all_gather":
        pair, c = 2 * k, case.num_ranks
        # All gradients of keys: their sum, by rank, and stacked; what comes back is the rank's.
        return held + pair * c * e + 3 * pair * c * w + pair * w
    if case.backend != "p2p":
        k = case.exchanged_keys
        held += (q + 2 * k) * e + output + gradient  # the same for other heads
    pair = 2 * k
    own_block = pair * (e + w) + (q + pair) * e  # keys, sums, gradients of the block
    if case.ring_size == 1:
        return held + own_block
    return held + max(
        own_block + pair * e,  # and the next keys on their way here
        pair * (e + 2 * w) + (q // 2 + pair) * e,  # keys of the other rank
        pair * (e + 3 * w) + (0 if w == e else (q + pair) * e),  # its sums have come home
    )


def _count_all(cases: Sequence[Case]) -> list[Counted]:
    return [_count(case) for case in cases]


def _count(case: Case) -> Counted:
    sizes = list(case.levels) if case.levels else None
    context = ParallelContext(
        ParallelLayout(context_parallel_size=case.num_ranks),
        context_options=ContextOptions(
            cp_comm_type=case.backend, hierarchical_context_parallel_sizes=sizes
        ),
    )
    part = SequencePart(context.cp.rank, case.num_ranks)
    q, k, v = (
        part.split(torch.randn(1, heads, case.length, case.head_size, dtype=case.dtype), 2)
        for heads in (case.heads, case.groups, case.groups)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    attention = BACKENDS[case.backend](context)
    with NetworkBytes() as watch:
        watch.see(q, k, v)
        out = attention(q, k, v, SequenceInfo(), case.head_size**-0.5)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    return Counted(dict(watch.sent), watch.peak_bytes)
