"""Layers of experts on one GPU, beside dense layers and the experts of ``transformers``.

    python -m benchmarks.gpu --case moe   # or make gpu-bench CASE=moe

bf16, forward and backward of one layer. *dense* is a layer of equal active FLOPs, k times as wide
as an expert; the goal is at most 1.25 times its time. ``transformers``' own layer of the same sizes
runs with each implementation of its experts. *crowded*: 90 % of the tokens have one expert as first
choice, which changes no product's FLOPs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from benchmarks.bench_moe import LAYER_LIMIT, ExpertShape, layers_of, mixtral_config
from benchmarks.gpu_cases import Item, Numbers, gpu_times_ms
from benchmarks.moe_counts import choices
from megatron_lightning.config import TransformerConfig

MIXTRAL = ExpertShape(
    num_layers=1, hidden_size=4096, num_heads=32, num_groups=8, ffn_size=14336, vocab_size=256,
    sequence=8192, batch=1, accelerator="gpu", precision="bf16-true",
)  # fmt: skip
"""A layer of Mixtral 8x7B."""
QWEN3 = replace(
    MIXTRAL, hidden_size=2048, ffn_size=768, num_groups=4, num_experts=128, topk=8, batch=2
)
"""A layer of Qwen3 30B-A3B."""
IMPLEMENTATIONS = ("eager", "grouped_mm")


def layer_beside_others(
    shape: ExpertShape,
    device: str = "cuda",
    times_ms: Callable[[Callable[[], Any]], list[float]] = gpu_times_ms,
) -> Numbers:
    """Time our layer, a crowded one, a dense one and those of ``transformers``.

    Args:
        shape: Sizes of the layer and of a batch.
        device: Where it runs.
        times_ms: Measures a function.
    """
    config, dtype = shape.config, torch.bfloat16
    experts: Any
    with torch.device(device):
        experts, dense = (layer.to(dtype) for layer in layers_of(config))
    shape_of_input = (shape.sequence, shape.batch, shape.hidden_size)
    tokens, gradient = torch.randn(2, *shape_of_input, device=device, dtype=dtype)

    def numbers_of(layer: nn.Module) -> dict[str, Any]:
        found = times_ms(partial(_forward_backward, layer, tokens, gradient))
        seconds = statistics.median(found) / 1e3
        flops = 18 * shape.tokens * shape.topk * shape.hidden_size * shape.ffn_size
        return {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12, "times_ms": found}

    numbers = {"experts": numbers_of(experts), "dense": numbers_of(dense)}
    made_up = choices(shape.tokens, experts.router.moe, 0.9).to(device)
    experts.router.choose = lambda scores, moe: made_up
    numbers["experts, crowded"] = numbers_of(experts)
    del experts, dense
    for implementation in IMPLEMENTATIONS:
        layer = _transformers_layer(config, implementation, device).to(dtype)
        numbers[f"transformers, {implementation}"] = numbers_of(layer)
        del layer
    ours = numbers["experts"]["ms"]
    return {
        **numbers,
        "of dense time": [ours / numbers["dense"]["ms"], f"limit {LAYER_LIMIT}"],
        "speed of transformers": {
            name: numbers[f"transformers, {name}"]["ms"] / ours for name in IMPLEMENTATIONS
        },
    }


def _transformers_layer(config: TransformerConfig, implementation: str, device: str) -> nn.Module:
    with torch.device(device):
        model: Any = MixtralForCausalLM(mixtral_config(config))
    model.set_experts_implementation(implementation)
    layer: nn.Module = model.model.layers[0].mlp
    return layer


def _forward_backward(layer: nn.Module, tokens: Tensor, gradient: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    out = layer(tokens.detach().requires_grad_())
    (out[0] if isinstance(out, tuple) else out).backward(gradient)


CASES: Mapping[str, Mapping[str, Item]] = {
    "moe": {
        "Mixtral 8x7B, a layer": Item(90, partial(layer_beside_others, MIXTRAL)),
        "Qwen3 30B-A3B, a layer": Item(90, partial(layer_beside_others, QWEN3)),
    },
}
"""Cases by name, as in :mod:`benchmarks.gpu_cases`."""
