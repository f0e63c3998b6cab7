"""Attention over sequences that are divided over ranks equals that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.sequence import SequencePart, join
from tests.helpers.ranks import run_ranks

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
KINDS = {
    "causal": SequenceInfo(),
    "full": SequenceInfo(causal=False),
    "window": SequenceInfo(window=5),
    "wide window": SequenceInfo(window=40),
}
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
    if not sequence.causal:
        return torch.ones_like(back, dtype=torch.bool)
    return (back >= 0) & (back <= (length if sequence.window is None else sequence.window))


def _reference(heads: str, dtype: torch.dtype, sequence: SequenceInfo) -> list[Tensor]:
    q, k, v, grad = _inputs(heads, dtype)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = _visible(q.shape[2], sequence)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    out.backward(grad)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def _cases() -> list[tuple[str, str, torch.dtype]]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return [(heads, kind, dtype) for heads in HEADS for kind in KINDS for dtype in dtypes]


def _local(num_ranks: int) -> list[list[Tensor]]:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    part = SequencePart(context.cp.rank, num_ranks)
    results = []
    for heads, kind, dtype in _cases():
        q, k, v, grad = (part.split(x, 2) for x in _inputs(heads, dtype))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = RingAttention(context.cp)(q, k, v, KINDS[kind], SCALE)
        out.backward(grad)
        results.append([x.detach() for x in (out, q.grad, k.grad, v.grad)])
    return [
        [x.float().numpy() if x.dtype != torch.float64 else x.numpy() for x in r] for r in results
    ]


# Rounding of the dtype on other partial sums; fp64 shows that nothing else is in between.
TOLERANCES = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_outputs_and_gradients_equal_an_explicit_mask(num_ranks: int) -> None:
    ranks = run_ranks(num_ranks, _local, num_ranks)
    for index, (heads, kind, dtype) in enumerate(_cases()):
        expected = _reference(heads, dtype, KINDS[kind])
        for number, full in enumerate(expected):
            parts = [torch.from_numpy(rank[index][number]) for rank in ranks]
            error = (join(parts, 2) - full).norm() / full.norm()
            assert error <= TOLERANCES[dtype], (heads, kind, dtype, number)


def _gradcheck(num_ranks: int) -> bool:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    part = SequencePart(context.cp.rank, num_ranks)
    attention = RingAttention(context.cp)

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

    q, k, v, _ = _inputs("gqa", torch.float64, length=8)
    return torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q[:1], k[:1], v[:1])])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_of_scatter_attention_gather(num_ranks: int) -> None:
    assert all(run_ranks(num_ranks, _gradcheck, num_ranks))


def _traffic(num_ranks: int) -> list[tuple[str, int]]:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    part = SequencePart(context.cp.rank, num_ranks)
    q, k, v, grad = (part.split(x, 2) for x in _inputs("gqa", torch.float32))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sent: list[tuple[str, int]] = []
    original = dist.batch_isend_irecv

    def counting(operations: list[Any]) -> Any:
        sent.extend((phase, op.tensor.numel()) for op in operations if op.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counting
    phase = "forward"
    out = RingAttention(context.cp)(q, k, v, SequenceInfo(), SCALE)
    phase = "backward"
    out.backward(grad)
    return sent


def test_a_ring_sends_keys_and_values_once_around() -> None:
    """Gathered keys under the name of a ring would pass the comparison of results."""
    for num_ranks in (2, 4):
        local = 2 * 2 * 2 * (64 // num_ranks) * 8  # keys and values [b, g, s / c, d]
        for sent in run_ranks(num_ranks, _traffic, num_ranks):
            assert sent.count(("forward", local)) == num_ranks - 1
            assert sent.count(("backward", local)) == 2 * (num_ranks - 1)  # and their gradients
            assert len(sent) == 3 * (num_ranks - 1)
