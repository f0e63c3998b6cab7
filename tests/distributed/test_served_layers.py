"""Parallel linear layers that round weights and inputs as servers do, against one layer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lightning.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.precision import QAT
from megatron_lightning.precision.served.inputs import INPUT_NAMES
from megatron_lightning.precision.served.qat import qat_of
from tests.helpers.ranks import run_ranks

TOKENS, SAMPLES, WIDTH = 32, 2, 256


def _rounding(layer: nn.Module, name: Any, activations: Any, amax: float) -> nn.Module:
    model = nn.ModuleList([layer])
    steps = 1 if activations in ("nvfp4", "fp8_tensor") else 0
    QAT(name, activations=activations, fake_quant_after_n_steps=steps).apply(model)
    rounding = qat_of(model)[""].rounding
    assert rounding is not None
    if rounding.inputs is not None:
        rounding.inputs.amax = {"0": amax}
    return layer


def _differences() -> dict[str, float]:
    """Return the largest relative difference of Y, dX and dW, by case."""
    context, found = ParallelContext(ParallelLayout(tensor_model_parallel_size=2)), {}
    rank = dist.get_rank()
    for name in ("int4", *INPUT_NAMES):
        for kind in (ColumnParallelLinear, RowParallelLinear):
            torch.manual_seed(0)
            plain, activations = nn.Linear(WIDTH, WIDTH, bias=False), name
            layer = kind.from_linear(deepcopy(plain), group=context.tp, sequence_parallel=True)
            x, grad = torch.randn(TOKENS, SAMPLES, WIDTH), torch.randn(TOKENS, SAMPLES, WIDTH)
            x[5] *= 30.0  # on one rank's tokens, and of its features
            x[..., 7] *= 10.0
            results = []
            for module in (plain, layer):
                options = None if name == "int4" else activations
                _rounding(module, name, options, float(x.abs().max()) / 2)
                dims = {ColumnParallelLinear: (0, -1), RowParallelLinear: (-1, 0)}[kind]
                own, dy = x, grad
                if module is layer:
                    own, dy = x.chunk(2, dims[0])[rank], grad.chunk(2, dims[1])[rank]
                own = own.clone().requires_grad_()
                y = module(own)
                y.backward(dy)
                results.append([y.detach(), own.grad, module.weight.grad])
            whole = results[0]
            expected = [
                whole[0].chunk(2, dims[1])[rank],
                whole[1].chunk(2, dims[0])[rank],
                layer.shard_specs["weight"].shard(whole[2]),
            ]
            pairs = zip(results[1], expected, strict=True)
            errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
            found[f"{name} {kind.__name__}"] = max(errors)
    return found


def test_two_ranks_equal_one_layer() -> None:
    """1e-6: sums in another order. Every scale is that of the full row, block or matrix."""
    for found in run_ranks(2, _differences):
        assert len(found) == 2 * (1 + len(INPUT_NAMES))
        assert max(found.values()) < 1e-6, found
