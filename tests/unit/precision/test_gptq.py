"""Codes found by second moments, against the same algorithm without a factorization."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.precision.served.gptq import factor, gptq_codes
from megatron_lightning.precision.served.values import Encoded, ServedFormat, encode

FORM = ServedFormat.of("int4", 32)


def _inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(200, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    mixed[:, 7] = 0.0
    return mixed


def _eliminated(weight: Tensor, moments: Tensor) -> Tensor:
    """The values, with the inverse of what is left computed anew for each column."""
    moments = moments.double()
    moments += (0.01 * moments.diagonal().mean()) * torch.eye(96)
    moments[7, 7] += 1.0
    left, values = weight.double().clone(), torch.empty(weight.shape, dtype=torch.float64)
    for j in range(96):
        if j % 32 == 0:
            scale = encode(left[:, j : j + 32].float(), FORM).scales[:, 0].double()
        inverse = moments[j:, j:].inverse()
        values[:, j] = (left[:, j] / scale).round().clamp(-8, 7) * scale
        left[:, j:] -= torch.outer((left[:, j] - values[:, j]) / inverse[0, 0], inverse[0])
    return values.float()


def _loss(encoded: Encoded, weight: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (encoded.values(FORM) - weight).t()).square().sum())


def test_columns_make_up_for_the_errors_of_earlier_ones() -> None:
    inputs, weight = _inputs(), torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    moments = inputs.t() @ inputs
    found = gptq_codes(weight, FORM, factor(moments))
    expected = _eliminated(weight, moments)
    assert float((found.values(FORM) == expected).float().mean()) > 0.999
    assert torch.equal(found.values(FORM), found.values(FORM).bfloat16().float())
    assert _loss(found, weight, inputs) < 0.5 * _loss(encode(weight, FORM), weight, inputs)
    assert torch.equal(weight, torch.randn(48, 96, generator=torch.Generator().manual_seed(1)))


def test_damaged_moments_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"second moments \[96, 96\].*not positive definite"):
        factor(-torch.eye(96))
    with pytest.raises(CheckpointError, match="not positive definite"):
        factor(torch.full((96, 96), torch.nan))
