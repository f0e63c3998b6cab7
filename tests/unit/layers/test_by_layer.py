"""Windows and rotary positions of single layers: which layer has which, and what follows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning import planning
from megatron_lightning.config import RopeScaling, TransformerConfig
from megatron_lightning.config.by_layer import unrotated_layers, windowed_layers
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.rotary import inverse_frequencies
from megatron_lightning.models import GPTModel
from tests.helpers.layouts import tiny_config

SIZES: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11,
}  # fmt: skip
LINEAR = RopeScaling(rope_type="linear", factor=4.0)
MIXED = tiny_config(
    **SIZES, window_size=(3, 0), window_attn_skip_freq=3, window_rotary_base=100.0,
    rope_scaling=LINEAR, no_rope_freq=[0, 0, 0, 0, 0, 1], mtp_num_layers=1,
)  # fmt: skip


def test_a_number_means_every_nth_layer_and_a_list_each_layer() -> None:
    """Megatron-Core's ``is_layer_window_attention``: layers count from 1."""
    assert windowed_layers(MIXED) == (True, True, False, True, True, False)
    one = replace(MIXED, window_attn_skip_freq=[1, 0, 0, 0, 0, 0])
    assert windowed_layers(one) == (True, *[False] * 5)
    assert windowed_layers(replace(MIXED, window_attn_skip_freq=None)) == (True,) * 6
    assert windowed_layers(replace(MIXED, window_attn_skip_freq=1)) == (False,) * 6
    assert unrotated_layers(MIXED) == (*[False] * 5, True)
    fourth = replace(MIXED, no_rope_freq=4)
    assert unrotated_layers(fourth) == (False, False, False, True, False, False)


def test_a_layer_has_its_own_window_and_positions() -> None:
    model = GPTModel(MIXED)
    layers = [layer.self_attention for layer in model.decoder.layers.values()]
    assert [layer.core_attention.window for layer in layers] == [3, 3, None, 3, 3, None]
    found = [None if layer.rotary is None else layer.rotary.base for layer in layers]
    assert found == [100.0, 100.0, 10000.0, 100.0, 100.0, None]
    assert layers[0].rotary is layers[4].rotary  # a table for all
    assert layers[0].rotary.scaling is None
    assert layers[2].rotary.scaling == LINEAR
    predicting = model.mtp.layers["0"].transformer_layer.self_attention
    assert predicting.core_attention.window is None  # as the last layer
    assert predicting.rotary is None
    torch.testing.assert_close(
        inverse_frequencies(8, 50.0, LINEAR), inverse_frequencies(8, 50.0) / 4.0
    )


def test_flops_are_those_of_the_layers() -> None:
    def flops(**options: Any) -> float:
        config = tiny_config(**SIZES, **options)
        return planning.flops(config, batch_size=2, sequence_length=16)

    narrow, wide = flops(window_size=(3, 0)), flops()
    mixed = flops(window_size=(3, 0), window_attn_skip_freq=3)
    assert mixed == pytest.approx((4 * narrow + 2 * wide) / 6)


def test_a_configuration_comes_back_from_plain_values() -> None:
    plain = json.loads(json.dumps(MIXED.to_dict()))
    again = TransformerConfig(**plain | {"window_size": tuple(plain["window_size"])})
    assert again == MIXED
    hash(again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_attn_skip_freq": 2}, "window_size is not set, so no layer has a window"),
        ({"window_size": (3, 0), "window_attn_skip_freq": 0}, "freq is 0, and num_layers is 6"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1, 0]}, r"is \(1, 0\), and num_layers"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [2] * 6}, r"list with 1 \(window\) or 0"),
        ({"no_rope_freq": [1, 0]}, r"no_rope_freq is \(1, 0\).*list with 1 \(no rotary"),
        ({"no_rope_freq": 2, "position_embedding_type": "none"}, "no_rope_freq is set, and posi"),
        ({"window_rotary_base": 10.0}, "window_rotary_base is 10.0, and window_size is not set"),
        ({"window_size": (3, 0), "window_rotary_base": -1.0}, "window_rotary_base is -1.0;"),
    ],
)
def test_what_no_layer_can_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**SIZES, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "yarn, and original_max_position_embeddings is not"),
        (
            {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 8},
            "=8 with rope_type=linear.*Leave it out",
        ),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 0.5}, "mscale=0.5 is an option of yarn"),
    ],
)
def test_a_rule_needs_what_it_looks_at(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**options)
