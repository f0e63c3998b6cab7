"""Models of layers with a single mixer train on every layout as on one process."""

from __future__ import annotations

import pytest

from megatron_lightning.config import MoEConfig
from tests.helpers.hybrids import LAYOUTS, assert_equals_one_process
from tests.helpers.language_model import small_gpt

EXPERTS = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=16)
LAYERS = small_gpt(0, layer_pattern="*-E*", moe=EXPERTS)
STAGES = small_gpt(0, layer_pattern="*-|E*/*-/*-", moe=EXPERTS)
USUAL = ("tp2, sp", "ep2")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in LAYOUTS],
)
def test_a_layout_equals_one_process(layout: str) -> None:
    assert_equals_one_process(LAYOUTS[layout], LAYERS)


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2, sp", "cp2", "ep2"))],
)
def test_layers_of_multi_token_prediction_are_a_pattern(layout: str) -> None:
    assert_equals_one_process(LAYOUTS[layout], STAGES)


@pytest.mark.slow
def test_a_stage_of_a_pattern_may_be_empty() -> None:
    config = small_gpt(0, layer_pattern="*-||E*|", moe=EXPERTS)
    assert_equals_one_process(LAYOUTS["pp2 x vpp2"], config)
