"""Quantized parallel linear layers against one layer: equal where ranks agree on the largest values
or blocks do not straddle shards."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lightning.layers.linear import gemm
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from tests.helpers.ranks import run_ranks
from tests.helpers.scaled_kernels import stand_ins

RECIPES = {
    name: FP8Recipe(scaling=name, stochastic_rounding=False)  # type: ignore[arg-type]
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
}
TOKENS, SAMPLES, WIDTH = 64, 2, 256  # Of each rank 128 features and 64 tokens: whole blocks.


def _run(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    store = WeightGradients()
    with store.collect((0, 0)):
        y.backward(grad)
    store.compute((0, 0))
    return [y.detach(), x.grad, layer.weight.grad]  # type: ignore[list-item]


def _compared(
    scaling: str, kind: str, sequence: bool, deferred: bool, backend: Any = "emulation"
) -> dict[str, Any]:
    """Return relative differences to an emulated layer, and the dtypes that were gathered."""
    torch.manual_seed(0)
    context = ParallelContext(
        ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=sequence)
    )
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    options: dict[str, Any] = {"group": context.tp, "sequence_parallel": sequence}
    cls = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = cls.from_linear(deepcopy(plain), **options)
    x, grad = torch.randn(TOKENS, SAMPLES, WIDTH), torch.randn(TOKENS, SAMPLES, WIDTH) * 1e-3
    x[5] *= 30.0  # on one rank's tokens, and of its features
    x[..., 7] *= 10.0
    for module in (plain, layer):
        shared, own = (context, backend) if module is layer else (None, "emulation")
        options = {"dtype": torch.float32, "backend": own}
        apply_recipe(nn.ModuleList([module]), RECIPES[scaling], shared, **options)
    expected = _run(plain, x, grad)
    rank, weight = dist.get_rank(), layer.shard_specs["weight"]
    tokens, features = (lambda t: t.chunk(2, 0)[rank]), (lambda t: t.chunk(2, -1)[rank])
    split_in = (tokens if sequence else lambda t: t) if kind == "column" else features
    split_out = features if kind == "column" else (tokens if sequence else lambda t: t)
    if deferred:
        store = WeightGradients()
        split_backwards(layer, store)
    start, sent = gemm.all_gather_start, list[torch.dtype]()
    with patch.object(gemm, "all_gather_start", lambda t, *a: sent.append(t.dtype) or start(t, *a)):
        y = layer(own := split_in(x).clone().requires_grad_())
        if deferred:
            with store.collect((0, 0)):
                y.backward(split_out(grad))
            store.compute((0, 0))
        else:
            y.backward(split_out(grad))
    wanted = [split_out(expected[0]), split_in(expected[1]), weight.shard(expected[2])]
    actual = [y.detach(), own.grad, layer.weight.grad]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(actual, wanted, strict=True)]
    return {"errors": errors, "sent": {str(kind) for kind in sent}}


@pytest.mark.spread(13)
@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("scaling", ["current", "blockwise", "mxfp8", "nvfp4", "delayed"])
def test_two_ranks_equal_one(scaling: str, kind: str, sequence: bool, deferred: bool) -> None:
    """1e-5: sums in another order. Per-tensor scales are gathered as codes, a byte a value; of
    others the values, once for both operands."""
    for result in run_ranks(2, _compared, scaling, kind, sequence, deferred):
        assert max(result["errors"]) < 1e-5
        codes = RECIPES[scaling].is_per_tensor
        expected = {"torch.float8_e4m3fn" if codes else "torch.float32"} if sequence else set()
        assert result["sent"] == expected


def _natively(scaling: str, kind: str, sequence: bool, deferred: bool) -> dict[str, Any]:
    with stand_ins():
        return _compared(scaling, kind, sequence, deferred, "native")


@pytest.mark.parametrize(
    ("scaling", "kind", "sequence", "deferred"),
    [
        pytest.param("current", "column", True, True, marks=pytest.mark.slow),
        ("blockwise", "row", True, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(
                ("current", "blockwise", "delayed"), ("column", "row"), (True, False), (True, False)
            )
        ),
    ],
)
def test_native_products_of_two_ranks_equal_one(
    scaling: str, kind: str, sequence: bool, deferred: bool
) -> None:
    """As above; the one layer is emulated."""
    for result in run_ranks(2, _natively, scaling, kind, sequence, deferred):
        assert max(result["errors"]) < 1e-5


@pytest.mark.parametrize("kind", ["column", "row"])
def test_scales_of_rows_across_a_cut_stay_in_a_band(kind: str) -> None:
    """A scale for half of a row is another one: within the rounding of e4m3 codes, 2^-4."""
    for result in run_ranks(2, _compared, "rowwise", kind, True, False):
        assert max(result["errors"]) < 2**-4
