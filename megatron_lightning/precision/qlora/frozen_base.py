"""Frozen base weights in 8 or 4 bits, beside trained adapters (QLoRA,
https://arxiv.org/abs/2305.14314, with the formats of FP8 recipes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.stacked_adapters import is_stack
from megatron_lightning.parallel.shards.parameters import num_names, rebind
from megatron_lightning.parallel.shards.stored_weight import stored_weights
from megatron_lightning.precision.assignment import quantizable_layers
from megatron_lightning.precision.qlora.base_formats import BaseFormat
from megatron_lightning.precision.qlora.frozen_weight import FrozenWeight


@torch.no_grad()
def quantize_base(module: nn.Module, name: BaseFormat) -> list[str]:
    """Keep the frozen weights of linear layers and experts as quantized data and scales, in place,
    one weight at a time. Weights on ``meta`` are quantized when they get values.

    Output layers, routers, embeddings, norms, trained layers and weights that two layers share keep
    their values.

    Args:
        module: The full module.
        name: The format.

    Returns:
        Names of the quantized weights.

    Raises:
        ConfigError: If there is nothing to quantize.
    """
    uses = num_names(module)
    layers = [f"{path}.weight" for path in quantizable_layers(module)]
    stacks = _stacks(module)
    names = []
    for weight_name in (*layers, *stacks):
        path, _, own_name = weight_name.rpartition(".")
        weight = module.get_submodule(path)._parameters.get(own_name)
        # A weight of two layers would have two owners of one set of scales.
        if weight is None or weight.requires_grad or uses[id(weight)] > 1:
            continue
        rebind(weight, FrozenWeight.quantize(weight.detach(), name))
        names.append(weight_name)
    if not names:
        raise ConfigError(
            f"base of LoRA is {name!r}, and {type(module).__name__} has no frozen linear layer "
            "that can be quantized (output layers and routers are not). Set base to None."
        )
    if not set(stacks).isdisjoint(names):
        _compute_one_by_one(module)
    return names


def _stacks(module: nn.Module) -> list[str]:
    """Return the names of the stacked experts of untouched models."""
    return [
        f"{path}.{own_name}" if path else own_name
        for path, child in module.named_modules()
        for own_name in child._parameters
        if is_stack(child, own_name)
    ]


def _compute_one_by_one(module: nn.Module) -> None:
    """Set models of ``transformers`` to compute one expert at a time, so that the values of a
    single expert exist at a time, and backward keeps none.
    """
    for child in module.modules():
        choose: Any = getattr(child, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")


def check_values(module: nn.Module, doing: str) -> None:
    """Check that no weight of a module is kept as quantized data.

    Args:
        module: The module, or a rank's part.
        doing: Name of the operation on the values.

    Raises:
        ConfigError: Naming a weight in few bits.
    """
    for name, weight in stored_weights(module).items():
        raise ConfigError(
            f"{doing} needs the values of {name}, and base={getattr(weight, 'format', '')!r} of "
            "LoRA keeps quantized data of it. Save a checkpoint, and add the adapters to the "
            "base's own values: megatron-lightning adapters merge CHECKPOINT FOLDER."
        )
