"""Direct messages between CPU ranks give what the collectives they stand for give, with gradients and when compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel import ParallelContext, ParallelLayout, cpu_exchange
from megatron_lightning.parallel import collectives as c
from tests.helpers.ranks import run_ranks

ROWS, COLUMNS = 24, 2**17  # more than the smallest size that is exchanged directly, on four ranks as well


def _body(dtype: torch.dtype) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=size)).tp
    everyone = torch.randn(size, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = everyone[rank].clone().requires_grad_()
    assert cpu_exchange.pays(x[: ROWS // size])
    # sums of two numbers are exact in any order; of more, they differ by roundings
    tolerance = {"rtol": 0.0, "atol": 0.0} if size == 2 else {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-1}

    gathered = c.gather_sequence(x, group)
    assert torch.equal(gathered, everyone.flatten(0, 1))
    (grad,) = torch.autograd.grad(gathered, x, torch.cat(list(everyone)) * (rank + 1))
    scale = sum(range(1, size + 1))
    torch.testing.assert_close(grad, everyone[rank] * scale, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-2)

    def run(x: Tensor) -> Tensor:
        return c.reduce_scatter(x, group)

    scattered = run(x)
    torch.testing.assert_close(scattered, everyone.sum(0).chunk(size)[rank], **tolerance)
    (grad,) = torch.autograd.grad(scattered, x, everyone[rank][: ROWS // size])
    assert torch.equal(grad, torch.cat([whole[: ROWS // size] for whole in everyone]))
    if dtype == torch.float32 and size == 2:
        assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), scattered)
    assert torch.equal(x.detach(), everyone[rank])


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=["2-fp32", "4-bf16"])
def test_direct_messages_equal_the_collectives(size: int, dtype: torch.dtype) -> None:
    run_ranks(size, _body, dtype)
