"""The conjugate pairs: values, gradients, under ``torch.compile`` and under recomputation; and the
vocabulary-parallel loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lightning.layers import vocab_parallel_cross_entropy
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel import collectives as c
from megatron_lightning.parallel.shards.spec import shard_range
from tests.helpers.ranks import run_ranks

PAIRS = [
    "copy_to_axis",
    "reduce_from_axis",
    "gather_sequence",
    "reduce_scatter",
    "scatter",
    "gather",
]


def everyone(size: int, shape: tuple[int, ...]) -> Tensor:
    """Return what the ranks hold, [size, *shape]."""
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(5))


def expected(name: str, dim: int, ranks: Tensor) -> list[Tensor]:
    """Return each rank's output, from all ranks' inputs, by the definition."""
    size, inputs = len(ranks), list(ranks)
    total = ranks.sum(0)
    return {
        "copy_to_axis": inputs,
        "reduce_from_axis": [total] * size,
        "gather_sequence": [torch.cat(inputs, dim)] * size,
        "gather": [torch.cat(inputs, dim)] * size,
        "reduce_scatter": list(total.chunk(size, dim)),
        "scatter": [x.chunk(size, dim)[r] for r, x in enumerate(inputs)],
    }[name]


CONJUGATE = {
    "copy_to_axis": "reduce_from_axis",
    "reduce_from_axis": "copy_to_axis",
    "gather_sequence": "reduce_scatter",
    "reduce_scatter": "gather_sequence",
    "scatter": "gather",
    "gather": "scatter",
}


def pair_body(dim: int) -> None:
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=dist.get_world_size()))
    group, size, rank = context.tp, dist.get_world_size(), dist.get_rank()
    ranks = everyone(size, (16, 8, 12))
    for name in PAIRS:
        options: dict[str, Any] = {} if name in PAIRS[:2] else {"dim": dim}
        function = partial(getattr(c, name), group=group, **options)
        x = ranks[rank].clone().requires_grad_()
        y = function(x)
        torch.testing.assert_close(
            y, expected(name, dim, ranks)[rank], msg=lambda m, name=name: f"{name}: {m}"
        )
        grads = everyone(size, tuple(y.shape))
        (grad,) = torch.autograd.grad(y, x, grads[rank])
        torch.testing.assert_close(
            grad,
            expected(CONJUGATE[name], dim, grads)[rank],
            msg=lambda m, name=name: f"{name}: {m}",
        )
        assert torch.equal(x.detach(), ranks[rank]), f"{name} changed its argument"


@pytest.mark.spread(1)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pairs_do_what_they_say(dim: int) -> None:
    run_ranks(4 if dim == 0 else 2, pair_body, dim)


def transformed_body() -> None:
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=dist.get_world_size())).tp
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()

    def run(x: Tensor) -> Tensor:
        y = c.reduce_from_axis(c.copy_to_axis(x * 2.0, group).sin(), group)
        y = c.gather_sequence(c.scatter(y.sin(), group), group).cos()
        return c.gather(c.reduce_scatter(y, group, 1).sin(), group)

    y = run(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    for changed in (
        torch.compile(run, backend="aot_eager", fullgraph=True),
        partial(checkpoint, run, use_reentrant=False),
    ):
        y_changed = changed(x)
        (grad_changed,) = torch.autograd.grad(y_changed.square().sum(), x)
        assert torch.equal(y, y_changed)
        torch.testing.assert_close(grad_changed, grad)


@pytest.mark.slow  # a compiled layer is in the short run: test_tensor_parallel.py
def test_pairs_compile_and_recompute() -> None:
    run_ranks(2, transformed_body)


def test_an_axis_of_one_rank_is_a_no_op() -> None:
    group = ParallelContext(ParallelLayout()).tp
    x = torch.randn(3, 5)
    for name in PAIRS:
        assert getattr(c, name)(x, group) is x


def uneven_gather() -> None:
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=dist.get_world_size())).tp
    whole = torch.arange(20.0).view(2, 10)
    start, length = shard_range(10, group.size, group.rank)
    x = whole[:, start : start + length].clone().requires_grad_()
    y = c.gather(x, group, -1, 10)
    assert torch.equal(y, whole)
    (grad,) = torch.autograd.grad(y, x, whole)
    assert torch.equal(grad, x)


def test_parts_of_unequal_size_are_gathered() -> None:
    run_ranks(4, uneven_gather)


def loss_body(vocab_size: int, dtype: torch.dtype) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=size)).tp
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 3, vocab_size, generator=generator) * 20.0).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (6, 3), generator=generator)
    targets[0, 1] = -100
    weights = torch.rand(6, 3, generator=generator)
    want = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(
        6, 3
    )
    (want_grad,) = torch.autograd.grad((want * weights).sum(), logits)
    start, length = shard_range(vocab_size, group.size, group.rank)
    shard = logits.detach()[..., start : start + length].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(shard, targets, group, vocab_size=vocab_size)
    (grad,) = torch.autograd.grad((losses * weights).sum(), shard)
    # Both sum exponentials in fp32, in another order; losses reach 60.
    torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-5)
    # A gradient is rounded once to the logits' dtype.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(
        grad, want_grad[..., start : start + length], rtol=tolerance, atol=1e-6
    )
    assert losses[0, 1] == 0
    assert not grad[0, 1].any()


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 64), (4, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_vocab_parallel_loss_equals_cross_entropy(
    size: int, vocab_size: int, dtype: torch.dtype
) -> None:
    run_ranks(size, loss_body, vocab_size, dtype)


def test_vocab_parallel_loss_on_one_rank() -> None:
    loss_body(50, torch.float32)


def beyond_the_vocabulary() -> None:
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=dist.get_world_size())).tp
    vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([8]), group)


def test_a_target_beyond_the_vocabulary_is_an_error_as_on_one_device() -> None:
    with pytest.raises(AssertionError, match="out of bounds"):
        run_ranks(2, beyond_the_vocabulary)
