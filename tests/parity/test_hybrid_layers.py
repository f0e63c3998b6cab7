"""Models of layers with a single mixer train on every layout as on one process."""

from __future__ import annotations

import pytest

from megatron_lightning.config import CompileOptions, DeltaNetConfig, MambaConfig, MoEConfig
from tests.helpers.layouts import LAYOUTS, assert_equals_one_process, make_layout, tiny_config

EXPERTS = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=16)
LAYERS = tiny_config(max_sequence_length=8, vocab_size=30, layer_pattern="*-E*", moe=EXPERTS)
STAGES = tiny_config(max_sequence_length=8, vocab_size=30, layer_pattern="*-|E*/*-/*-", moe=EXPERTS)
WITH_STATES = tiny_config(
    layer_pattern="M-G*",
    vocab_size=30,
    mamba=MambaConfig(state_dim=8, head_dim=8, num_groups=1, chunk_size=8),
    delta_net=DeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, chunk_size=8
    ),
)
COMPILED = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
USUAL = ("tp2", "ep2")
RARE = ("pp2", "cp2", "fsdp2", "dp2-zero1", "tp2-pp2", "tp2-cp2", "pp2-vpp2")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "layout",
    [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)],
)
def test_a_layout_equals_one_process(layout: str) -> None:
    assert_equals_one_process(layout, LAYERS)


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "cp2", "ep2"))],
)
def test_layers_of_multi_token_prediction_are_a_pattern(layout: str) -> None:
    assert_equals_one_process(layout, STAGES)


@pytest.mark.slow
def test_a_stage_of_a_pattern_may_be_empty() -> None:
    config = tiny_config(max_sequence_length=8, vocab_size=30, layer_pattern="*-||E*|", moe=EXPERTS)
    assert_equals_one_process("pp2-vpp2", config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2", "fsdp2"])
def test_compiled_layers_with_states_equal_one_process(layout: str) -> None:
    options = dict(LAYOUTS[layout].options or ())
    compiled = make_layout(layout, LAYOUTS[layout].ranks, **options, **COMPILED)
    assert_equals_one_process(compiled, WITH_STATES)
