"""Output layer and loss as one, with the vocabulary split over 2 and 4 ranks: losses and gradients
equal those of the whole layer and ``F.cross_entropy``.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_lightning.layers.linear.parallel_linear import VocabParallelLinear
from megatron_lightning.layers.losses.linear_loss import Head, linear_losses
from megatron_lightning.layers.losses.loss import VocabParallelCrossEntropy
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.shards.spec import shard_range
from tests.helpers.ranks import run_ranks

SEQUENCE, BATCH, HIDDEN = 12, 3, 8


def body(
    vocab_size: int, sequence_parallel: bool, keep: bool, chunk: int | None, smoothing: float
) -> None:
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=dist.get_world_size())).tp
    torch.manual_seed(4)
    whole = nn.Linear(HIDDEN, vocab_size)
    nn.init.normal_(whole.weight)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    targets = torch.randint(vocab_size, (SEQUENCE, BATCH))
    targets[0, 1] = -100
    weights = torch.rand(SEQUENCE, BATCH)

    logits = whole(x).flatten(0, 1)
    want = F.cross_entropy(
        logits, targets.flatten(), reduction="none", label_smoothing=smoothing
    ) + smoothing * logits.logsumexp(-1).square().masked_fill(targets.flatten() == -100, 0.0)
    (want.view(SEQUENCE, BATCH) * weights).sum().backward()

    options = {"sequence_parallel": sequence_parallel, "sequence_dim": 0}
    layer = VocabParallelLinear.from_linear(deepcopy(whole), group=group, **options)
    loss = VocabParallelCrossEntropy(group, vocab_size, label_smoothing=smoothing, z_loss=smoothing)
    shard = x.detach().chunk(group.size)[group.rank] if sequence_parallel else x.detach()
    shard = shard.clone().requires_grad_()
    if chunk is None:  # as the model calls it
        losses = layer(shard, targets, loss)
    else:
        head = Head(layer.gemm, loss.vocabulary(vocab_size), layer.sequence_axis, True, chunk, keep)
        losses = linear_losses(shard, layer.weight, layer.bias, targets, head)
    # fp32 sums in another order; losses reach 20.
    torch.testing.assert_close(losses.flatten(), want, rtol=1e-6, atol=2e-6)
    assert losses[0, 1] == 0
    (losses * weights).sum().backward()

    start, length = shard_range(vocab_size, group.size, group.rank)
    assert x.grad is not None
    assert whole.weight.grad is not None
    full = x.grad.chunk(group.size)[group.rank] if sequence_parallel else x.grad
    for grad, expected in (
        (shard.grad, full),
        (layer.weight.grad, whole.weight.grad[start : start + length]),
        (layer.bias.grad, whole.bias.grad[start : start + length]),
    ):
        assert (grad - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 64), (2, 67), (4, 50), (4, 301)])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_losses_and_gradients_equal_one_rank(
    size: int, vocab_size: int, sequence_parallel: bool
) -> None:
    run_ranks(size, both, vocab_size, sequence_parallel)


def both(vocab_size: int, sequence_parallel: bool) -> None:
    for keep in (False, True):
        for chunk in (5, 36, None):
            for smoothing in (0.0, 0.1):
                body(vocab_size, sequence_parallel, keep, chunk, smoothing)
