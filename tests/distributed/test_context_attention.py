"""Attention over sequences that are divided over ranks equals that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.context import backends
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.parallel import ParallelContext, ParallelLayout, sequence_exchange
from megatron_lightning.parallel.sequence import SequencePart, join
from tests.helpers.ranks import run_ranks

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "uneven": (12, 3)}
LEVELS = {1: [1, 1], 2: [2, 1], 4: [2, 2], 8: [4, 2]}
DOCUMENTS = Documents(((0, 3, 20, 21, 50, 64), (0, 64)))
KINDS = {
    "causal": SequenceInfo(),
    "full": SequenceInfo(causal=False),
    "window": SequenceInfo(window=5),
    "wide window": SequenceInfo(window=40),
    "documents": SequenceInfo(documents=DOCUMENTS),
    "documents, full": SequenceInfo(causal=False, documents=DOCUMENTS),
    "documents, window": SequenceInfo(window=5, documents=DOCUMENTS),
}
CHUNKS = {"documents": 8, "documents, window": 4}
"""Chunks of each rank in the cases whose rows are dealt."""
SCALE = 0.3


def _inputs(heads: str, dtype: torch.dtype, length: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, groups = HEADS[heads]
    shapes = [(2, number, length, 8) for number in (queries, groups, groups, queries)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def _visible(length: int, sequence: SequenceInfo) -> Tensor:
    back = torch.arange(length)[:, None] - torch.arange(length)
    visible = torch.ones_like(back, dtype=torch.bool)
    if sequence.causal:
        visible = (back >= 0) & (back <= (length if sequence.window is None else sequence.window))
    if sequence.documents is None:
        return visible
    number = torch.zeros(2, length)
    for row, document in sequence.documents.spans():
        number[row, document.start :] += 1
    return (visible & (number[:, :, None] == number[:, None]))[:, None]


def _reference(heads: str, dtype: torch.dtype, sequence: SequenceInfo) -> list[Tensor]:
    q, k, v, grad = _inputs(heads, dtype)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = _visible(q.shape[2], sequence)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    out.backward(grad)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def _context(num_ranks: int, backend: Any, levels: list[int] | None = None) -> ParallelContext:
    sizes = (levels or LEVELS[num_ranks]) if backend == "a2a+p2p" else None
    options = ContextOptions(cp_comm_type=backend, hierarchical_context_parallel_sizes=sizes)
    return ParallelContext(ParallelLayout(context_parallel_size=num_ranks), context_options=options)


def _cases(num_ranks: int, backend: str) -> list[tuple[str, str, torch.dtype]]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    if backend == "a2a" and num_ranks > 4:  # there are 4 heads
        return []
    return [(heads, kind, dtype) for heads in HEADS for kind in KINDS for dtype in dtypes]


def _sequence(kind: str, num_ranks: int, backend: str) -> SequenceInfo:
    """Return the sequences, with a deal of their chunks where ranks take one."""
    known = KINDS[kind]
    if kind not in CHUNKS or known.documents is None or backend == "a2a+p2p":
        return known
    deal = known.documents.dealt(num_ranks, [CHUNKS[kind]])
    return replace(known, documents=Documents(known.documents.boundaries, deal))


def _local(
    num_ranks: int, backend: str, levels: list[int] | None = None, kernels: Any = "auto"
) -> list[list[Tensor]]:
    context = _context(num_ranks, backend, levels)
    results = []
    for heads, kind, dtype in _cases(num_ranks, backend):
        sequence = _sequence(kind, num_ranks, backend)
        part = SequencePart(context.cp.rank, num_ranks, sequence.deal)
        q, k, v, grad = (part.split(x, 2) for x in _inputs(heads, dtype))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = BACKENDS[backend](context)(q, k, v, sequence, SCALE, backend=kernels)
        out.backward(grad)
        results.append([x.detach() for x in (out, q.grad, k.grad, v.grad)])
    return [
        [x.float().numpy() if x.dtype != torch.float64 else x.numpy() for x in r] for r in results
    ]


# Rounding of the dtype on other partial sums; fp64 shows that nothing else is in between.
TOLERANCES = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 3e-2}


def _spread(*usual: tuple[int, str], sizes: Sequence[int]) -> Any:
    """Parametrize over sizes and backends; those that are not ``usual`` are in the long matrix."""
    cases = [(size, backend) for size in sizes for backend in BACKENDS]
    return pytest.mark.parametrize(
        ("num_ranks", "backend"),
        [pytest.param(*c, marks=() if c in usual else pytest.mark.slow) for c in cases],
    )


@pytest.mark.spread(1)
@_spread((2, "all_gather"), (2, "a2a"), (2, "p2p"), sizes=[1, 2, 4, 8])
def test_outputs_and_gradients_equal_an_explicit_mask(num_ranks: int, backend: str) -> None:
    _compare(num_ranks, backend)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [[1, 4], [4, 1], [2, 4]])
def test_other_levels(levels: list[int]) -> None:
    _compare(levels[0] * levels[1], "a2a+p2p", levels)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_products_and_a_softmax_compute_blocks(num_ranks: int) -> None:
    _compare(num_ranks, "p2p", kernels="math")


def _compare(
    num_ranks: int, backend: str, levels: list[int] | None = None, kernels: str = "auto"
) -> None:
    ranks = run_ranks(num_ranks, _local, num_ranks, backend, levels, kernels)
    for index, (heads, kind, dtype) in enumerate(_cases(num_ranks, backend)):
        sequence = _sequence(kind, num_ranks, backend)
        expected = _reference(heads, dtype, sequence)
        for number, full in enumerate(expected):
            parts = [torch.from_numpy(rank[index][number]) for rank in ranks]
            error = (join(parts, 2, sequence.deal) - full).norm() / full.norm()
            assert error <= TOLERANCES[dtype], (heads, kind, dtype, number)


def _gradcheck(num_ranks: int, backend: str) -> bool:
    context = _context(num_ranks, backend)
    part = SequencePart(context.cp.rank, num_ranks)
    attention = BACKENDS[backend](context)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, local: Tensor) -> Tensor:
            if num_ranks == 1:
                return local.clone()
            parts = [torch.empty_like(local) for _ in range(num_ranks)]
            dist.all_gather(parts, local.contiguous(), group=context.cp.process_group)
            return join(parts, 2)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return part.split(grad, 2)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, full: Tensor) -> Tensor:
            return part.split(full, 2)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return Gather.apply(grad)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = [Scatter.apply(x) for x in (q, k, v)]
        return Gather.apply(attention(*local, SequenceInfo(), SCALE))

    # Each element costs two runs.
    q, k, v = (x[:1, ..., :2] for x in _inputs("gqa", torch.float64, length=8)[:3])
    return torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, v)])


@pytest.mark.slow
@_spread((2, "p2p"), (2, "all_gather"), (2, "a2a"), sizes=[1, 2, 4])
def test_gradients_of_scatter_attention_gather(num_ranks: int, backend: str) -> None:
    assert all(run_ranks(num_ranks, _gradcheck, num_ranks, backend))


def _traffic(num_ranks: int, backend: str) -> list[tuple[str, str, int]]:
    """Return phase, kind and elements of what this rank hands to the network."""
    context = _context(num_ranks, backend)
    part = SequencePart(context.cp.rank, num_ranks)
    q, k, v, grad = (part.split(x, 2) for x in _inputs("mha", torch.float32))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sent: list[tuple[str, str, int]] = []

    def counted(kind: str, run: Any, size: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.extend((phase, kind, number) for number in size(*args))
            return run(*args, **kwargs)

        return call

    def sends(operations: list[Any]) -> list[int]:
        return [op.tensor.numel() for op in operations if op.op is dist.isend]

    dist.batch_isend_irecv = counted("send", dist.batch_isend_irecv, sends)
    sequence_exchange._all_to_all = counted(
        "all-to-all", sequence_exchange._all_to_all, lambda x, _: [x.numel()]
    )
    sequence_exchange.all_gather_start = counted(
        "gather", sequence_exchange.all_gather_start, lambda x, *_: [x.numel()]
    )
    backends.reduce_scatter_start = counted(
        "scatter", backends.reduce_scatter_start, lambda x, *_: [x.numel()]
    )
    phase = "forward"
    out = BACKENDS[backend](context)(q, k, v, SequenceInfo(), SCALE)
    phase = "backward"
    out.backward(grad)
    return sent


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_ring_sends_keys_and_values_once_around(num_ranks: int) -> None:
    """Gathered keys under the name of a ring would pass the comparison of results."""
    pair = 2 * LOCAL // num_ranks  # keys and values
    for sent in run_ranks(num_ranks, _traffic, num_ranks, "p2p"):
        assert sent.count(("forward", "send", pair)) == num_ranks - 1
        assert sent.count(("backward", "send", pair)) == 2 * (num_ranks - 1)  # their gradients too
        assert len(sent) == 3 * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_the_others_send(num_ranks: int) -> None:
    local = LOCAL // num_ranks  # of queries, keys, values or outputs
    for sent in run_ranks(num_ranks, _traffic, num_ranks, "all_gather"):
        assert sent == [
            ("forward", "gather", 2 * local),
            ("backward", "gather", 2 * local),
            ("backward", "scatter", 2 * local * num_ranks),
        ]
    for sent in run_ranks(num_ranks, _traffic, num_ranks, "a2a"):
        assert sent == [
            (phase, "all-to-all", local) for phase in ["forward"] * 4 + ["backward"] * 4
        ]


def test_levels_exchange_heads_and_send_keys_and_values_once_around() -> None:
    """4 ranks in groups of 2: one hop of a ring of 2 with the keys and values of 2 ranks for half
    of the heads; a ring of 4 makes three hops of this size.
    """
    local = LOCAL // 4
    exchange, send = ("all-to-all", local), ("send", 2 * local)
    forward = [exchange, exchange, exchange, send, exchange]
    backward = [exchange, send, send, exchange, exchange, exchange]
    for sent in run_ranks(4, _traffic, 4, "a2a+p2p"):
        phases = [("forward", *what) for what in forward]
        assert sent == phases + [("backward", *what) for what in backward]


LOCAL = 2 * 4 * 64 * 8  # elements of queries [b, n, s, d] of all ranks


def _undivided(num_ranks: int) -> str:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    x = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ShardingError) as raised:
        BACKENDS["a2a"](context)(x, x, x, SequenceInfo(), SCALE)
    return str(raised.value)


def test_heads_that_do_not_divide_are_refused() -> None:
    for error in run_ranks(2, _undivided, 2):
        assert "3 heads cannot be divided over the 2 context-parallel ranks" in error
