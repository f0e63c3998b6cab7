"""A model with a user's kind of layer trains on a layout as on one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import losses_of, small_gpt
from tests.helpers.ranks import run_ranks

OWN_KIND = "tests.helpers.squashed_layer.Squashed"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
}


def _losses(options: dict[str, Any]) -> tuple[list[float], list[float], float]:
    config = small_gpt(4, layer_pattern=["dense", OWN_KIND, OWN_KIND, "dense"])
    return losses_of(GPTLightningModule(config), MegatronStrategy(**options), [])


@pytest.mark.spread(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_users_kind_of_layer_trains_as_on_one_process(layout: str) -> None:
    (expected,) = run_ranks(1, _losses, {})
    for losses, norms, validation in run_ranks(2, _losses, LAYOUTS[layout]):
        # fp32, sums in another order.
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=1e-5)
        assert validation == pytest.approx(expected[2], rel=1e-5)
