"""Checks of the layers and inputs that a QAT rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.served.inputs import INPUT_NAMES
from megatron_lightning.precision.served.values import ServedFormat, fused_paths


def check_inputs(name: str, weights: Iterable[str]) -> None:
    """Check the format of inputs beside those of weights.

    Raises:
        ConfigError: If servers do not multiply them, naming what they do.
    """
    if name not in INPUT_NAMES:
        raise ConfigError(
            f"activations are to be in {name!r}, of which servers have no kernel. Set one of "
            f"{', '.join(INPUT_NAMES)}, with weights in the same format."
        )
    if name not in weights:
        raise ConfigError(
            f"activations are to be in {name}, and weights are in {' and '.join(weights)}: servers "
            f"multiply both in one format. Set weights to {name}, or leave activations out."
        )


def check_fused(
    paths: Collection[str],
    form_of: Callable[[str], ServedFormat | None],
    user: str = "qat",
    way_out: str = "Give them the same in modules.",
) -> None:
    """Check that layers that servers multiply as one matrix have one format.

    Args:
        paths: All layers.
        form_of: Returns the format of a layer. None: bf16.
        user: Who gives the formats, for messages.
        way_out: What to set.
    """
    for path in paths:
        for other in fused_paths(path):
            first, second = form_of(path), form_of(other)
            if other in paths and first != second:
                found = ["bf16" if form is None else form.name for form in (first, second)]
                raise ConfigError(
                    f"{user} has {path} in {found[0]} and {other} in {found[1]}, and servers "
                    f"multiply both as one matrix, in one format. {way_out}"
                )


def check_layer(path: str, layer: Any, form: ServedFormat) -> None:
    """Check that a layer's blocks are those of the matrices that servers load."""
    check_columns(f"{path}.weight", layer.weight, form)
    rows = tuple(getattr(layer, "fused_rows", ()))
    size = form.block.rows
    if size is not None and size > 1 and any(n % size for n in rows):
        raise ConfigError(
            f"qat rounds {path} to {form.name}, whose blocks have {size} rows, and the layer's "
            f"matrices of {', '.join(map(str, rows))} rows lie between one another: their blocks "
            "are not those of the separate matrices that servers load. Set qat to fp8_channel, or "
            "train with HuggingFaceModule."
        )


def check_columns(name: str, weight: Any, form: ServedFormat) -> None:
    """Check that the values of a scale divide the rows of a weight."""
    if reason := form.misfit(weight.shape[-1]):
        raise ConfigError(f"qat rounds {name} of shape {list(weight.shape)}: {reason}.")


def check_halves(name: str, weight: Any, form: ServedFormat) -> None:
    """Check that no block holds rows of gate and of up, which servers load as two matrices."""
    size, rows = form.block.rows, weight.shape[-2] // 2
    if "gate_up" in name and size is not None and size > 1 and rows % size:
        raise ConfigError(
            f"qat rounds {name} to {form.name}, whose blocks have {size} rows, and gate and up "
            f"have {rows:,} rows each: a block would hold rows of both. Set qat to fp8_channel."
        )
