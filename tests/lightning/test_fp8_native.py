"""Trainings with native FP8 products, on a CPU, beside emulated ones in the same layout."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from megatron_lightning.precision.native import NativeGemm
from megatron_lightning.strategies import fp8
from tests.helpers.ranks import run_ranks
from tests.helpers.scaled_kernels import stand_ins
from tests.lightning.test_fp8 import CASES, _compared

SCALINGS = ("delayed", "current", "rowwise", "blockwise")
FAST = [("current", "tp2-pp2"), ("rowwise", "ep2")]


def _natively(strategy: dict[str, Any], scaling: str, options: dict[str, Any]) -> Any:
    """Return losses, norms, and how many products were native."""
    forward = NativeGemm.forward
    with (
        stand_ins(exact=True),
        patch.object(fp8, "choose_backend", lambda *_: "native"),
        patch.object(NativeGemm, "forward", autospec=True, side_effect=forward) as products,
    ):
        losses, norms = _compared(strategy, scaling, options)
    return losses, norms, products.call_count


@pytest.mark.parametrize(
    ("scaling", "case"),
    [
        pytest.param(scaling, case, marks=[] if (scaling, case) in FAST else [pytest.mark.slow])
        for scaling in SCALINGS
        for case in CASES
    ],
)
def test_a_training_equals_the_emulated_one(scaling: str, case: str) -> None:
    """In the first step, up to few values that are rounded to the neighbor in bf16, as a sum comes
    in another order, and codes that flip by that. Adam's first step is the learning rate times a
    gradient's sign, also of one that is all rounding; what follows stays in a band."""
    ranks, strategy, options = CASES[case]
    arguments = (strategy, scaling, options)
    emulated = run_ranks(ranks, _compared, *arguments, timeout_s=100)
    native = run_ranks(ranks, _natively, *arguments, timeout_s=100)
    for (losses, norms), (own, own_norms, num_products) in zip(emulated, native, strict=True):
        assert num_products
        assert own[0] == pytest.approx(losses[0], rel=5e-4)
        assert own_norms[0] == pytest.approx(norms[0], rel=5e-3)
        assert own == pytest.approx(losses, rel=2e-2)
