"""Codes of a weight made of its ranges are those that a layer's products make of all of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_lightning.parallel.grid.context import ALONE
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.native import NativeGemm
from megatron_lightning.precision.quantized_data import Range, WeightRanges, encode
from megatron_lightning.precision.weights import RecipeQuantizer

SHAPES = {"one block": (64, 40), "ragged": (300, 200), "experts": (3, 130, 150), "one": (1, 256, 8)}
CUTS = {"rows": [128 * 40], "anywhere": [1, 77, 3000, 9001], "none": []}


CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [EmulatedGemm, NativeGemm])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise"])
def test_ranges_have_the_codes_of_the_full_weight(
    scaling: str, shape: str, cuts: str, kind: type[EmulatedGemm]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(SHAPES[shape]) * torch.logspace(-3, 2, SHAPES[shape][-2])[:, None]
    gemm = kind(FP8Recipe(scaling=scaling))  # type: ignore[arg-type]
    if gemm.histories:
        gemm.histories["weight"].load(torch.tensor([3.0]))
    quantizer = RecipeQuantizer(gemm, SHAPES[shape])
    codes = torch.zeros(weight.numel(), dtype=torch.uint8)
    ends = sorted({0, *(cut for cut in CUTS[cuts] if cut < len(codes)), len(codes)})
    flat = weight.flatten()
    ranges = [
        Range(start, flat[start:stop], codes[start:stop])
        for start, stop in itertools.pairwise(ends)
    ]
    encode([WeightRanges(quantizer, ranges, CPU)], ALONE, lambda *_: None)
    kept = codes.view(quantizer.dtype).view(weight.shape)
    for transposed in (False, True):
        expected = gemm.operand(weight, "weight", transposed=transposed)
        operand = gemm.operand(kept, "weight", transposed=transposed)
        assert torch.equal(operand.data.float(), expected.data.float())
        assert torch.equal(operand.scales, expected.scales)  # type: ignore[arg-type]
        assert operand.scales.shape == expected.scales.shape  # type: ignore[union-attr]


@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise"])
def test_a_weight_that_overflowed_shows_in_its_codes(scaling: str) -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = torch.inf
    gemm = EmulatedGemm(FP8Recipe(scaling=scaling))  # type: ignore[arg-type]
    quantizer, codes = RecipeQuantizer(gemm, (4, 4)), torch.zeros(16, dtype=torch.uint8)
    weights = [WeightRanges(quantizer, [Range(0, weight.flatten(), codes)], CPU)]
    encode(weights, ALONE, lambda *_: None)
    kept = gemm.operand(codes.view(quantizer.dtype).view(4, 4), "weight")
    y = gemm.forward(gemm.operand(torch.ones(2, 4), "input"), kept)
    assert y.isnan().any()


def test_largest_values_of_other_ranks_are_shared_once() -> None:
    """A weight of which a tensor-parallel rank has the larger part takes that rank's scale."""
    gemm = EmulatedGemm(FP8Recipe(scaling="current"))
    quantizer, codes = RecipeQuantizer(gemm, (2, 8)), torch.zeros(16, dtype=torch.uint8)
    quantizer.group = ALONE

    def other_rank(tensor: torch.Tensor, *_: object) -> None:
        tensor.clamp_(min=896.0)

    weights = [WeightRanges(quantizer, [Range(0, torch.ones(16), codes)], CPU)]
    encode(weights, ALONE, other_rank)
    assert gemm.operand(codes.view(quantizer.dtype).view(2, 8), "weight").scales == 2.0
