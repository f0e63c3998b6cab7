"""Operands that backward keeps of quantized layers, and codes of weights: what a plan counts is
what the emulation saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning import planning
from megatron_lightning.config import MoEConfig, RecomputeOptions, TransformerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.activation_memory import stage_profile
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from tests.helpers.layouts import tiny_config

BATCH, SEQUENCE = 2, 256
MODEL: dict[str, Any] = {
    "hidden_size": 64, "num_query_groups": 2,
    "vocab_size": 512, "ffn_hidden_size": 160, "max_sequence_length": SEQUENCE,
}  # fmt: skip
SCALINGS = ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")


def saved_bytes(config: TransformerConfig, recipe: FP8Recipe) -> int:
    """Return the bytes that a quantized layer saves, without weights and their codes."""
    model = GPTModel(config)
    for gemm in apply_recipe(model, recipe).quantized.values():
        gemm.keeps_weight = True
    layer, saved = model.decoder.layers["1"], dict[int, int]()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    hidden = torch.randn(SEQUENCE, BATCH, config.hidden_size, requires_grad=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        out = layer(hidden)
    found = sum(saved.values())
    out.sum().backward()  # which frees them
    return found


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_quantized_layer_keeps_what_is_planned(scaling: Any) -> None:
    config, recipe = tiny_config(**MODEL), FP8Recipe(scaling=scaling)
    sizes = Sizes(
        config=config, layout=ParallelLayout(), precision=precision_of("bf16-mixed"), device="cpu",
        sequence_length=SEQUENCE, micro_batch_size=BATCH, split_backward=False, fp8_recipe=recipe,
    )  # fmt: skip
    planned = stage_profile(sizes, ["decoder.layers.1"], RecomputeOptions()).kept
    rotations = 2 * 2 * SEQUENCE * config.head_dim // 2
    # Scales of rows or tensors, at most.
    assert 0 <= saved_bytes(config, recipe) - planned - rotations <= 2048


def test_codes_of_weights_are_kept_in_a_run() -> None:
    config = tiny_config(**MODEL, moe=MoEConfig(num_experts=4, layer_freq=(0, 1)))
    with torch.device("meta"):
        model = GPTModel(config)

    def activations(recipe: FP8Recipe) -> int:
        return planning.memory(
            config, ParallelLayout(), precision="bf16-mixed", fp8_recipe=recipe
        ).activations_bytes

    for scaling, num_sets in (("current", 1), ("rowwise", 2)):
        recipe = FP8Recipe(scaling=scaling)  # type: ignore[arg-type]
        quantized = apply_recipe(model, recipe).quantized
        numel = sum(model.get_parameter(f"{path}.weight").numel() for path in quantized)
        none = FP8Recipe(scaling="current", fp8_param_gather=True)
        assert activations(recipe) - activations(none) == num_sets * numel
