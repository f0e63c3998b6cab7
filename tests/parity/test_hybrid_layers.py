"""Models of layers with a single mixer train on every layout as on one process."""

from __future__ import annotations

import pytest

from megatron_lightning.config import CompileOptions, DeltaNetConfig, MambaConfig, MoEConfig
from tests.helpers.hybrids import LAYOUTS, assert_equals_one_process
from tests.helpers.language_model import small_gpt

EXPERTS = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=16)
LAYERS = small_gpt(0, layer_pattern="*-E*", moe=EXPERTS)
STAGES = small_gpt(0, layer_pattern="*-|E*/*-/*-", moe=EXPERTS)
WITH_STATES = small_gpt(
    0,
    layer_pattern="M-G*",
    max_sequence_length=16,
    mamba=MambaConfig(state_dim=8, head_dim=8, num_groups=1, chunk_size=8),
    delta_net=DeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, chunk_size=8
    ),
)
COMPILED = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2, sp", "cp2", "pp2", "fsdp2"])
def test_compiled_layers_with_states_equal_one_process(layout: str) -> None:
    size, data, options = LAYOUTS[layout]
    assert_equals_one_process((size, data, options | COMPILED), WITH_STATES)
