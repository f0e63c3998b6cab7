"""Our recipes as Transformer Engine's, field by field.

    ours                          DelayedScaling         Float8CurrentScaling  Float8BlockScaling
    format                        fp8_format             fp8_format            (e4m3)
    power_of_two_scales           (no)                   fp8_quant_*           fp8_quant_*
    margin                        margin
    amax_history_len, ..._algo    the same names

    ours                          MXFP8BlockScaling      NVFP4BlockScaling
    weight_2d_scaling             (no)                   not disable_2d_quantization
    random_hadamard_transform                            not disable_rht
    stochastic_rounding                                  not disable_stochastic_rounding

Each field is passed explicitly, even with the default value, because Transformer Engine reads
defaults from the environment. ``num_layers_*_in_bf16`` and ``modules`` decide whether a layer gets
an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.transformer_engine.library import Library

_AVAILABLE: Mapping[str, str] = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def all_recipes(recipe: FP8Recipe) -> list[FP8Recipe]:
    """Return a recipe and the recipes of its rows."""
    return [recipe, *(row for row in recipe.rows.values() if row is not None)]


def check_recipe(recipe: FP8Recipe) -> None:
    """Check that Transformer Engine has the recipe, and the recipes of the rows.

    Raises:
        ConfigError: If a recipe is missing.
    """
    for row in all_recipes(recipe):
        if row.scaling == "rowwise":
            raise ConfigError(
                "scaling is rowwise with backend 'transformer_engine', which has no recipe with a "
                "scale for each row. Set scaling to current or blockwise, or backend to native."
            )
        if row.scaling == "delayed" and row.rounds_scales:
            raise ConfigError(
                "power_of_two_scales is True with scaling=delayed and backend "
                "'transformer_engine', whose delayed scales are not rounded. Remove it, or set "
                "scaling to current."
            )


def check_available(recipe: FP8Recipe, library: Library) -> None:
    """Check that this process's GPU can run the recipe, and the recipes of the rows.

    Raises:
        ConfigError: With Transformer Engine's reason.
    """
    for row in all_recipes(recipe):
        available, reason = getattr(library.pytorch, _AVAILABLE[row.scaling])(return_reason=True)
        if not available:
            raise ConfigError(
                f"scaling is {row.scaling} with backend 'transformer_engine', and this GPU cannot "
                f"run it: {reason} Set another scaling, or backend to emulation."
            )


def te_recipe(recipe: FP8Recipe, library: Library, *, reduces: bool) -> Any:
    """Return Transformer Engine's recipe.

    Args:
        recipe: Ours.
        library: Transformer Engine.
        reduces: Whether several ranks share amax values (delayed scaling). With a single rank
            nothing is reduced, because a group of None would mean all ranks.
            not, no group is reduced over: a group of None would be all ranks.
    """
    te = library.recipe
    data_format = te.Format.HYBRID if recipe.format == "hybrid" else te.Format.E4M3
    if recipe.scaling == "delayed":
        return te.DelayedScaling(
            margin=recipe.margin,
            fp8_format=data_format,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
            reduce_amax=reduces,
        )
    if recipe.scaling == "current":
        scaling_recipe = te.Float8CurrentScaling(
            use_power_2_scales=recipe.rounds_scales, fp8_format=data_format
        )
        return _with_rounding(scaling_recipe, recipe, te)
    if recipe.scaling == "blockwise":
        scaling_recipe = te.Float8BlockScaling(
            use_f32_scales=not recipe.rounds_scales, fp8_format=data_format
        )
        return _with_rounding(scaling_recipe, recipe, te)
    if recipe.scaling == "mxfp8":
        return te.MXFP8BlockScaling(fp8_format=data_format, enable_2d_quantization=False)
    # Transformer Engine's options say what is off.
    return te.NVFP4BlockScaling(
        disable_rht=not recipe.random_hadamard_transform,
        disable_stochastic_rounding=not recipe.stochastic_rounding,
        disable_2d_quantization=not recipe.weight_2d_scaling,
    )


def _with_rounding(own: Any, recipe: FP8Recipe, te: Any) -> Any:
    """Return the recipe with scales rounded as ours says: these attributes follow the environment,
    not the constructor.
    """
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(own, name, te.QParams(power_2_scale=recipe.rounds_scales, amax_epsilon=0.0))
    return own
