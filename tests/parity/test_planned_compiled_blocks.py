"""A plan predicts what the partitioner of inductor saves of a compiled layer, to the byte.

The backend is ``aot_eager_decomp_partition``, which divides forward and backward as inductor does
(decompositions and min-cut partitioner) and runs eager kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.activation_memory import stage_profile
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from tests.helpers.layouts import tiny_config

BATCH, SEQUENCE = 2, 64
MODEL: dict[str, Any] = {
    "hidden_size": 64, "num_query_groups": 2,
    "vocab_size": 512, "ffn_hidden_size": 160, "max_sequence_length": SEQUENCE,
}  # fmt: skip
GPT2 = {
    "num_query_groups": None, "normalization": "LayerNorm", "activation": "gelu",
    "add_bias_linear": True, "position_embedding_type": "learned_absolute",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("32-true", {}),
    "bf16": ("bf16-true", {}),
    "autocast": ("bf16-mixed", {}),
    "wide stream": ("bf16-true", {"fp32_residual_connection": True}),
    "LayerNorm, GELU, biases": ("32-true", GPT2),
    "dropout": ("32-true", {"hidden_dropout": 0.1}),
    "windows": ("32-true", {"window_size": (32, 0)}),
    "math": ("32-true", {"attention_backend": "math"}),
    "Gemma 2": (
        "32-true",
        {
            "norm_placement": "sandwich",
            "layernorm_zero_centered_gamma": True,
            "activation": "geglu_tanh",
            "attn_logit_softcapping": 5.0,
        },
    ),
    "sinks": (
        "32-true",
        {
            "softmax_type": "learnable",
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
        },
    ),
    "norms of heads": ("32-true", {"qk_layernorm": True}),
}
FEW = ("fp32", "autocast", "LayerNorm, GELU, biases")


def saved_bytes(config: TransformerConfig, precision: str) -> int:
    """Return the bytes that one compiled layer saves, without weights."""
    torch._dynamo.reset()
    half = torch.bfloat16 if precision == "bf16-true" else torch.float32
    wide = torch.float32 if config.fp32_residual_connection else half
    layer = GPTModel(config).to(half).decoder.layers["1"]
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    hidden = torch.randn(SEQUENCE, BATCH, config.hidden_size, dtype=wide, requires_grad=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        out = compiled(hidden)
    found = sum(saved.values())
    out.sum().backward()  # which frees them
    return found


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_compiled_layer_keeps_what_is_planned(name: str) -> None:
    precision, options = CASES[name]
    config = tiny_config(**MODEL | options)
    sizes = Sizes(
        config=config, layout=ParallelLayout(), precision=precision_of(precision), device="cpu",
        sequence_length=SEQUENCE, micro_batch_size=BATCH, split_backward=False, compiled=True,
    )  # fmt: skip
    planned = stage_profile(sizes, ["decoder.layers.1"], RecomputeOptions()).kept
    assert planned == saved_bytes(config, precision)
