"""Quantized data kept by an FP8 recipe: operands of GEMMs (``precision/emulation.py``), and weights
(``precision/weights.py``). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.blueprint import unit_weights
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.planning.ledger.rank_parameters import ParameterCount, kind_of, local_size
from megatron_lightning.precision.recipes import BLOCK_SIZES, FP8Recipe

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MODEL = "model."  # attribute of GPTLightningModule with the model


def count_quantized(
    config: TransformerConfig, layout: ParallelLayout, unit: str, recipe: FP8Recipe | None
) -> ParameterCount:
    """Return the weights of a unit on a rank that are stored as quantized data if ranks share main
    params: weights of linear layers and experts quantized by the recipe.
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
    """Return the recipe of a linear layer at ``path``, or None for bf16."""
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
    """Return the bytes of a saved operand value, including a share of the block's scale.

    Scales of rows and tensors are left out.
    """
    scale = {"blockwise": 4, "mxfp8": 1, "nvfp4": 4}.get(recipe.scaling, 0)
    return 1 + scale / BLOCK_SIZES.get(recipe.scaling, 1)


def cached_weight_bytes(
    config: TransformerConfig, layout: ParallelLayout, unit: str, recipe: FP8Recipe | None
) -> float:
    """Return the bytes of the quantized weights that a unit caches in a pipeline run, beside the
    weights. Two sets are cached if the two GEMMs of a weight have scales along different dims.
    """
    if recipe is None or recipe.fp8_param_gather or kind_of(config, unit) is None:
        return 0.0
    cached = 0.0
    for path, count in _matrices(config, layout, unit):
        weight_recipe = recipe_of(config, recipe, f"{unit}.{path}")
        if weight_recipe is not None:
            num_sets = 1 if weight_recipe.is_per_tensor or weight_recipe.is_square("weight") else 2
            cached += num_sets * operand_bytes(weight_recipe) * count.total
    return cached


def count_matrices(config: TransformerConfig, layout: ParallelLayout, unit: str) -> int:
    """Return the weights of the linear layers of a block on a rank. 0: the unit is no block."""
    if kind_of(config, unit) is None:
        return 0
    return sum(count.total for _, count in _matrices(config, layout, unit))


def _matrices(
    config: TransformerConfig, layout: ParallelLayout, unit: str
) -> Iterator[tuple[str, ParameterCount]]:
    """Yield the weights of the linear layers of a unit, by layer path in the unit."""
    for weight in unit_weights(config, unit):
        if weight.kind == "matrix":
            yield weight.module, local_size(weight, layout)
