"""Weights kept as quantized data: operations with and without values."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megatron_lightning.precision.qlora.base_formats import BaseFormat
from megatron_lightning.precision.qlora.frozen_weight import FrozenWeight


@pytest.mark.parametrize("name", get_args(BaseFormat))
def test_slices_at_blocks_stay_quantized_and_others_are_values(name: BaseFormat) -> None:
    torch.manual_seed(0)
    weight = FrozenWeight.quantize(torch.randn(8, 256), name)
    values = weight.dequantized()
    for dim, size, stays in ((0, 3, True), (1, 128, True), (1, 24, False)):
        parts = torch.split(weight, size, dim)
        assert [isinstance(part, FrozenWeight) for part in parts] == [stays] * len(parts)
        for part, expected in zip(parts, torch.split(values, size, dim), strict=True):
            full = part.dequantized() if isinstance(part, FrozenWeight) else part
            assert torch.equal(full, expected)
