"""Codes that an FP8 recipe keeps: of operands of products (``precision/emulation.py``), and weights
(``precision/weights.py``). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_lightning.config import TransformerConfig
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.patterns import compile_pattern
from megatron_lightning.planning.parameters import (
    ParameterCount,
    kind_of,
    predicting_layer_of,
)
from megatron_lightning.precision.recipes import BLOCK_SIZES, FP8Recipe

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MODEL = "model."  # where GPTLightningModule holds its model


def count_codes(
    config: TransformerConfig, layout: ParallelLayout, unit: str, recipe: FP8Recipe | None
) -> ParameterCount:
    """Return the weights of a unit on a rank that are codes where ranks share their main params:
    those of linear layers and experts that the recipe quantizes.
    """
    if recipe is None or not recipe.fp8_param_gather or kind_of(config, unit) is None:
        return ParameterCount()
    counts = [
        count
        for path, count in _matrices(config, layout, unit)
        if recipe_of(config, recipe, f"{unit}.{path}") is not None
    ]
    return sum(counts, ParameterCount())


def recipe_of(config: TransformerConfig, recipe: FP8Recipe | None, path: str) -> FP8Recipe | None:
    """Return the recipe of a linear layer at ``path``; None: bf16."""
    if recipe is None:
        return None
    for pattern, row in recipe.rows.items():
        if any(compile_pattern(pattern).fullmatch(name) for name in (path, _MODEL + path)):
            return row
    layer = _LAYER.match(path)
    if layer is None:
        return recipe if path.startswith("mtp.") else None
    last = config.num_layers - recipe.num_layers_at_end_in_bf16
    return recipe if recipe.num_layers_at_start_in_bf16 <= int(layer[1]) < last else None


def operand_bytes(recipe: FP8Recipe) -> float:
    """Return the bytes of a value that backward keeps of an operand, with its share of a block's
    scale; those of rows and tensors are left out.
    """
    scale = {"blockwise": 4, "mxfp8": 1, "nvfp4": 4}.get(recipe.scaling, 0)
    return 1 + scale / BLOCK_SIZES.get(recipe.scaling, 1)


def kept_weight_bytes(
    config: TransformerConfig, layout: ParallelLayout, unit: str, recipe: FP8Recipe | None
) -> float:
    """Return the bytes of the weights' codes that a unit keeps in a pipeline run, beside the
    weights: two sets where the two products that read them have scales along other dims.
    """
    if recipe is None or recipe.fp8_param_gather or kind_of(config, unit) is None:
        return 0.0
    kept = 0.0
    for path, count in _matrices(config, layout, unit):
        own = recipe_of(config, recipe, f"{unit}.{path}")
        if own is not None:
            num_sets = 1 if own.is_per_tensor or own.is_square("weight") else 2
            kept += num_sets * operand_bytes(own) * count.total
    return kept


def _matrices(
    config: TransformerConfig, layout: ParallelLayout, unit: str
) -> Iterator[tuple[str, ParameterCount]]:
    """Yield the weights of the linear layers of a unit, by the paths of these in it; the router and
    the gate of shared experts are no such layers for a recipe.
    """
    h, inner = config.hidden_size, ""
    if predicting_layer_of(unit) is not None:
        inner = "transformer_layer."
        yield "eh_proj", ParameterCount(2 * h * h // layout.tp)
    for name, size in _attention(config, layout.tp):
        yield f"{inner}self_attention.{name}", ParameterCount(size)
    up, moe = (2 if config.gated else 1), config.moe
    if moe is None or kind_of(config, unit) == "dense":
        f = config.ffn_size // layout.tp
        yield f"{inner}mlp.linear_fc1", ParameterCount(h * up * f)
        yield f"{inner}mlp.linear_fc2", ParameterCount(h * f)
        return
    one = h * config.expert_ffn_size * (moe.num_experts // layout.ep) // layout.etp
    yield f"{inner}mlp.experts.linear_fc1", ParameterCount(0, up * one)
    yield f"{inner}mlp.experts.linear_fc2", ParameterCount(0, one)
    shared = (moe.shared_expert_intermediate_size or 0) // layout.tp
    yield f"{inner}mlp.shared_experts.linear_fc1", ParameterCount(h * up * shared)
    yield f"{inner}mlp.shared_experts.linear_fc2", ParameterCount(h * shared)


def _attention(config: TransformerConfig, tp: int) -> Iterator[tuple[str, int]]:
    h, n, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is None:
        yield "linear_qkv", h * config.qkv_rows // tp
        yield "linear_proj", h * n * config.head_dim // tp
        return
    queries = n * mla.q_head_dim // tp
    if mla.q_lora_rank is None:
        yield "linear_q_proj", h * queries
    else:
        yield "linear_q_down_proj", h * mla.q_lora_rank
        yield "linear_q_up_proj", mla.q_lora_rank * queries
    yield "linear_kv_down_proj", h * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    yield "linear_kv_up_proj", mla.kv_lora_rank * n * (mla.qk_head_dim + mla.v_head_dim) // tp
    yield "linear_proj", h * n * mla.v_head_dim // tp
