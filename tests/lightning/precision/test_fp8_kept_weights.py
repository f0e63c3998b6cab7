"""Trainings in which a weight is quantized once a pipeline run equal those that do it for every
micro-batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from torch import Tensor

from megatron_lightning.precision.emulation import EmulatedGemm
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_matrix import recipe_matrix
from tests.helpers.trainers import Losses
from tests.lightning.precision.test_fp8_combinations import (
    BATCH,
    KINDS,
    PP,
    SCALINGS,
    TP,
    ZB_H1,
    ZBV,
    Case,
)
from tests.lightning.precision.test_fp8_parameters import FSDP

LAYOUTS: dict[str, Case] = {
    "one": Case(),
    "accumulated": Case(accumulated=3),  # runs of a step, between which scales change
    "pp2": Case(2, {PP: 2}),
    "zb-h1": Case(2, ZB_H1),
    "zbv-tp2": Case(4, {**ZBV, TP: 2}),
    "dp2": Case(2, replicas=2),
    "experts": Case(model="experts"),
    "latent": Case(model="latent"),
    "llama": Case(model="llama"),
    "output": Case(output=True),
    **{f"recompute-{name}": Case(1, {"recompute": kind}) for name, kind in KINDS.items()},
    "fsdp2": Case(2, FSDP, replicas=2),
}
FAST = [("delayed", "accumulated")]
_NEVER = property(lambda gemm: False, lambda gemm, value: None)


def _fit(case: Case, scaling: str, keeps: bool) -> Any:
    """Return results, and how often weights were quantized in training."""
    count, quantized = 0, EmulatedGemm._quantized

    def counted(gemm: EmulatedGemm, weight: Tensor, second: bool) -> Any:
        nonlocal count
        count += gemm.notes
        return quantized(gemm, weight, second)

    never = patch.object(EmulatedGemm, "keeps_weight", _NEVER, create=True)
    with patch.object(EmulatedGemm, "_quantized", counted), nullcontext() if keeps else never:
        results = case.fit(scaling)
    return *results, count


@pytest.mark.slow
@recipe_matrix(SCALINGS, LAYOUTS, fast=FAST)
@pytest.mark.timeout(240)
def test_codes_of_a_step_train_as_those_of_micro_batches_do(scaling: str, case: str) -> None:
    """Bit by bit, and a weight is quantized as often as of one micro-batch at most, of a replica's
    four or two; FSDP2 frees the weight in between."""
    own = LAYOUTS[case]
    kept, plain = (
        run_ranks(own.ranks, _fit, own, scaling, keeps, timeout_s=200) for keeps in (True, False)
    )
    for (*results, count), (*others, before) in zip(kept, plain, strict=True):
        assert results == others
        if case == "fsdp2":
            assert count == before
        else:
            assert 0 < count <= before // (BATCH // own.replicas)


class _CallThenWrite(pl.Callback):
    """Calls the model between steps, then writes weights in a way that no version counts."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.model(batch["tokens"])
        for parameter in module.parameters():
            parameter.data.mul_(0.5)


@pytest.mark.parametrize(
    "steps", ["one micro-batch", pytest.param("pipelined", marks=pytest.mark.slow)]
)
def test_callbacks_may_call_the_model_and_write_its_weights(steps: str) -> None:
    case = Case(1, {} if steps == "pipelined" else {"micro_batch_size": None}, steps=2)

    def losses() -> list[float]:
        record = Losses()
        case.train("blockwise", record, _CallThenWrite())
        return record.losses

    kept = losses()
    with patch.object(EmulatedGemm, "keeps_weight", _NEVER, create=True):
        assert losses() == kept
