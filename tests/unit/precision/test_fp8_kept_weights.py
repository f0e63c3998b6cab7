"""A weight is quantized once for all micro-batches of a pipeline run, as it would be for each."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.native import NativeGemm
from tests.helpers.scaled_kernels import stand_ins
from tests.unit.precision.test_fp8_quantize import RECIPES

NATIVE = ("delayed", "current", "rowwise", "blockwise")


@pytest.fixture
def quantized() -> Iterator[MagicMock]:
    """Counts quantizations of weights."""
    own = EmulatedGemm._quantized
    with patch.object(EmulatedGemm, "_quantized", autospec=True, side_effect=own) as calls:
        yield calls


def _layer(recipe: FP8Recipe, backend: str = "emulation") -> tuple[nn.Linear, EmulatedGemm]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 50))
    (gemm,) = apply_recipe(model, recipe, backend=backend).quantized.values()  # type: ignore[arg-type]
    return model[0], gemm


def _run(layer: nn.Linear, num_microbatches: int) -> list[Tensor]:
    """Return outputs and gradients of micro-batches, all forwards before all backwards."""
    torch.manual_seed(1)
    inputs = [torch.randn(40, 70, requires_grad=True) for _ in range(num_microbatches)]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [layer(x) for x in inputs]
    grads: list[Tensor] = []
    for x, y in zip(inputs, outputs, strict=True):
        grads += torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))
    return [*outputs, *grads]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, EmulatedGemm) for name in RECIPES), *((name, NativeGemm) for name in NATIVE)],
)
def test_micro_batches_share_codes_that_are_those_of_each(
    name: str, kind: type[EmulatedGemm], quantized: MagicMock
) -> None:
    """Once, or twice where blocks along rows and along columns have codes of their own; largest
    values enter the history once a micro-batch."""
    recipe, backend = RECIPES[name], "native" if kind is NativeGemm else "emulation"
    noted, results = [], []
    for keeps in (False, True):
        layer, gemm = _layer(recipe, backend)
        gemm.keeps_weight = keeps
        quantized.reset_mock()
        with stand_ins():
            results.append(_run(layer, 3))
        sets = 1 if recipe.is_per_tensor or recipe.is_square("weight") else 2
        assert quantized.call_count == (sets if keeps else 6)
        noted.append({role: own.take_noted() for role, own in gemm.histories.items()})
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert noted[0] == noted[1]
    assert all(p.dtype == torch.float32 for p in results[1][-1:])


def test_weights_that_change_are_quantized_again(quantized: MagicMock) -> None:
    layer, gemm = _layer(FP8Recipe())
    gemm.keeps_weight = True
    before = _run(layer, 1)[0]
    with torch.no_grad():
        layer.weight.mul_(2.0)  # which autograd sees
    assert not torch.equal(_run(layer, 1)[0], before)
    layer.weight.data.mul_(0.5)  # and does not
    gemm.forget_weight()
    assert torch.equal(_run(layer, 1)[0], before)
    assert quantized.call_count == 3


def test_nothing_is_kept_of_computed_weights_and_in_evaluation(quantized: MagicMock) -> None:
    class Noise(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + torch.randn_like(weight)

    layer, gemm = _layer(FP8Recipe())
    gemm.keeps_weight, gemm.notes = True, False
    _run(layer, 2)
    gemm.notes = True
    register_parametrization(layer, "weight", Noise())
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (layer(torch.ones(4, 70)) for _ in range(2))
    assert not torch.equal(first, second)
    assert quantized.call_count == 6 and gemm._weight is None
