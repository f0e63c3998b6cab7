"""Trainings with native FP8 products, on a CPU, beside emulated ones in the same layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from megatron_lightning.precision.native import NativeGemm
from megatron_lightning.strategies import fp8
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_matrix import recipe_matrix
from tests.helpers.scaled_kernels import stand_ins
from tests.lightning.precision.test_fp8 import CASES, _compared
from tests.lightning.precision.test_fp8_combinations import Case
from tests.lightning.precision.test_fp8_parameters import (
    LAYOUTS,
    assert_codes_change_nothing,
    assert_equal_results,
    fit_kept,
)

SCALINGS = ("delayed", "current", "rowwise", "blockwise")
FAST = [("current", "tp2-pp2"), ("rowwise", "ep2")]


@contextmanager
def _natively() -> Iterator[MagicMock]:
    """Compute by the native backend; count the layers."""
    make = NativeGemm.__init__
    with (
        patch.object(fp8, "choose_backend", lambda *_: "native"),
        patch.object(NativeGemm, "__init__", autospec=True, side_effect=make) as layers,
    ):
        yield layers


def _compared_natively(strategy: dict[str, Any], scaling: str, options: dict[str, Any]) -> Any:
    """Return losses, norms, and how many layers were native."""
    with stand_ins(exact=True), _natively() as layers:
        losses, norms = _compared(strategy, scaling, options)
    return losses, norms, layers.call_count


@pytest.mark.spread(1)
@recipe_matrix(SCALINGS, CASES, fast=FAST)
def test_a_training_equals_the_emulated_one(scaling: str, case: str) -> None:
    """In the first step, up to few values that are rounded to the neighbor in bf16, as a sum comes
    in another order, and codes that flip by that. Adam's first step is the learning rate times a
    gradient's sign, also of one that is all rounding; what follows stays in a band."""
    ranks, strategy, options = CASES[case]
    arguments = (strategy, scaling, options)
    emulated = run_ranks(ranks, _compared, *arguments, timeout_s=100)
    native = run_ranks(ranks, _compared_natively, *arguments, timeout_s=100)
    for (losses, norms), (own, own_norms, num_layers) in zip(emulated, native, strict=True):
        assert num_layers
        assert own[0] == pytest.approx(losses[0], rel=5e-4)
        assert own_norms[0] == pytest.approx(norms[0], rel=5e-3)
        assert own == pytest.approx(losses, rel=2e-2)


# -------------------------------------------------------------------------------- weights as codes

CODED = (
    "dp2", "tp2", "pp2", "zbv", "cp2", "experts", "latent", "llama", "compiled", "overlapped",
    "recompute-selective", "fsdp2", "fsdp3", "fsdp-tp2", "fsdp-zbv", "fsdp-ep2", "fsdp-selective",
)  # fmt: skip


def _coded_natively(case: Case, scaling: str) -> Any:
    """Train with torch's CPU kernels; it has none of blocks."""
    with stand_ins() if scaling == "blockwise" else nullcontext(), _natively() as layers:
        results = fit_kept(case, scaling)
    assert layers.called
    return results


def _both(case: Case, scaling: str) -> list[Any]:
    """Train with codes and without."""
    return [_coded_natively(replace(case, coded=coded), scaling) for coded in (True, False)]


@pytest.mark.slow
def test_two_ranks_renew_the_codes_after_a_step() -> None:
    """The loss of the second step, evaluation and prediction are those of the changed weights. By
    blocks, since torch's kernels of the other recipes take minutes on some processors.
    """
    for coded, plain in run_ranks(
        2, _both, replace(LAYOUTS["dp2"], steps=2), "blockwise", timeout_s=110
    ):
        assert_equal_results(coded, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "case"),
    [(scaling, case) for scaling in ("delayed", "current", "blockwise") for case in CODED],
)
@pytest.mark.timeout(240)
def test_codes_train_as_fp32_weights_do(scaling: str, case: str) -> None:
    assert_codes_change_nothing(_coded_natively, LAYOUTS[case], scaling)
