"""All-gathers and reduce-scatters of CPU ranks, large and small, are what their names say, with
gradients and when compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel import ParallelContext, ParallelLayout, cpu_exchange
from megatron_lightning.parallel import collectives as c
from tests.helpers.ranks import run_ranks

ROWS = 24
# More than the smallest size of direct messages, on four ranks as well, and less.
COLUMNS = {"direct": 2**17, "collective": 3}


def _body(dtype: torch.dtype, kind: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ParallelContext(ParallelLayout(tensor_model_parallel_size=size)).tp
    everyone = torch.randn(
        size, ROWS, COLUMNS[kind], generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    x = everyone[rank].clone().requires_grad_()
    assert (x[: ROWS // size].nbytes >= cpu_exchange.SMALLEST_DIRECT_BYTES) == (kind == "direct")
    # sums of two numbers are exact in any order; of more, they differ by roundings
    tolerance = (
        {"rtol": 0.0, "atol": 0.0}
        if size == 2
        else {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-1}
    )

    gathered = c.gather_sequence(x, group)
    assert torch.equal(gathered, everyone.flatten(0, 1))
    (grad,) = torch.autograd.grad(gathered, x, torch.cat(list(everyone)) * (rank + 1))
    scale = sum(range(1, size + 1))
    torch.testing.assert_close(
        grad, everyone[rank] * scale, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-2
    )

    def run(x: Tensor) -> Tensor:
        return c.reduce_scatter(x, group)

    scattered = run(x)
    torch.testing.assert_close(scattered, everyone.sum(0).chunk(size)[rank], **tolerance)
    (grad,) = torch.autograd.grad(scattered, x, everyone[rank][: ROWS // size])
    assert torch.equal(grad, torch.cat([whole[: ROWS // size] for whole in everyone]))
    if dtype == torch.float32 and size == 2:
        assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), scattered)
    assert torch.equal(x.detach(), everyone[rank])

    buffer = everyone[rank].flatten().clone()  # as gradients and parameters are exchanged: in place
    work = cpu_exchange.reduce_chunks(buffer, dist.group.WORLD)
    assert isinstance(work, cpu_exchange.Messages) == (kind == "direct")
    work.wait()
    own = buffer.chunk(size)[rank]
    torch.testing.assert_close(own, everyone.sum(0).flatten().chunk(size)[rank], **tolerance)
    reduced = own.clone()
    work = cpu_exchange.gather_chunks(buffer, dist.group.WORLD)
    assert isinstance(work, cpu_exchange.Messages) == (kind == "direct")
    work.wait()
    torch.testing.assert_close(buffer, everyone.sum(0).flatten(), **tolerance)
    assert torch.equal(own, reduced)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=["2-fp32", "4-bf16"]
)
def test_exchanges_equal_sums_and_concatenations(size: int, dtype: torch.dtype, kind: str) -> None:
    run_ranks(size, _body, dtype, kind)
