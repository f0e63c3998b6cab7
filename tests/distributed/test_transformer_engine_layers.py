"""Parallel linear layers computed by engines, against the layers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.transformer_engine.backend import TransformerEngine
from megatron_lightning.precision.transformer_engine.library import load
from tests.helpers.fake_transformer_engine import installed
from tests.helpers.ranks import run_ranks


def _run(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin())
    result = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return result  # type: ignore[return-value]


def _compared(kind: str, dim: int | None, options: dict[str, Any]) -> list[float]:
    """Return the largest difference of output and gradients; ``dim``: of the sequence shards."""
    torch.manual_seed(0)
    context = ParallelContext(
        ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=dim is not None)
    )
    cls: Any = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = cls.from_linear(
        nn.Linear(32, 64), group=context.tp, sequence_parallel=dim is not None,
        sequence_dim=dim or 0, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(dist.get_rank() if dim is not None else 1)
    x = torch.randn(8, 6, 32 if kind == "column" else 16, generator=generator)
    expected = _run(layer, x)
    with installed():
        backend = TransformerEngine(FP8Recipe(scaling="current"), load(has_gpu=True))
        backend.attach(nn.ModuleDict({"layer": layer}), context, caches_weights=True)
        actual = _run(layer, x)
    assert [value.shape for value in actual] == [value.shape for value in expected]
    return [(a - b).abs().max().item() for a, b in zip(actual, expected, strict=True)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "dim", "options"),
    [
        ("column", None, {}),
        ("column", 0, {}),
        ("column", 1, {}),
        ("column", None, {"copy_input": False}),
        ("column", 0, {"gather_output": True}),
        ("row", None, {}),
        ("row", 0, {}),
        ("row", 1, {}),
    ],
)
def test_engines_gather_and_reduce_as_the_layers(
    kind: str, dim: int | None, options: dict[str, Any]
) -> None:
    """1e-5 of values up to 10: the same sums in another order; batch-first models have their
    sequence in dim 1, and regions have copied the input already."""
    for differences in run_ranks(2, _compared, kind, dim, options):
        assert max(differences) < 1e-4 and len(differences) == 4
