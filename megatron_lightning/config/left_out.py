"""Values of options in Megatron and bitsandbytes not supported by this package."""

from __future__ import annotations

from collections.abc import Mapping

_KITCHEN = (
    "Kitchen, NVIDIA's library of experimental recipes, is not public and not part of this package."
)
_BITSANDBYTES = "That is a format of bitsandbytes, whose kernels are not part of this package."
_FOUR_BITS = f"{_BITSANDBYTES} Set it to nvfp4, with 4.5 bits a weight."
_EIGHT_BITS = f"{_BITSANDBYTES} Set it to mxfp8, with 8.25 bits a weight."
LEFT_OUT: Mapping[tuple[str, str], str] = {
    ("router_load_balancing_type", "sinkhorn"): (
        "Sinkhorn iterates over the tokens of one rank, so its routing depends on the layout. Set "
        "it to aux_loss, or to none with router_enable_expert_bias."
    ),
    ("router_load_balancing_type", "quantile_balancing"): (
        "Quantiles are not implemented. Set it to none with router_enable_expert_bias, which "
        "balances by a bias as well."
    ),
    ("token_dispatcher_type", "flex"): (
        "Its fused kernels are not part of this package. Set it to alltoall."
    ),
    ("scaling", "kitchen"): f"{_KITCHEN} Set it to nvfp4 or mxfp8.",
    ("scaling", "tensorwise"): "That is Megatron's name of current scaling. Set it to current.",
    ("scaling", "custom"): (
        "Recipes of your own are not supported. Set it to delayed, current, rowwise, blockwise, "
        "mxfp8 or nvfp4."
    ),
    ("format", "e5m2"): (
        "Activations and weights would keep two bits. Set it to hybrid, which takes e5m2 for "
        "gradients."
    ),
    ("base", "nf4"): _FOUR_BITS,
    ("base", "fp4"): _FOUR_BITS,
    ("base", "4bit"): _FOUR_BITS,
    ("base", "int8"): _EIGHT_BITS,
    ("base", "8bit"): _EIGHT_BITS,
    ("backend", "kitchen"): (
        f"{_KITCHEN} Set it to auto, or to emulation, which runs every recipe on any device."
    ),
}
"""Option and value -> the reason, and the setting to use instead. The command line shows the text,
too, because the parser knows only the choices of an option."""
