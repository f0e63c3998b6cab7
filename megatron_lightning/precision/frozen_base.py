"""Frozen base weights in 8 or 4 bits, beside trained adapters (QLoRA,
https://arxiv.org/abs/2305.14314, with the formats of FP8 recipes).
"""

from __future__ import annotations

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.stacked_adapters import is_stack
from megatron_lightning.parallel.parameters import num_names, rebind
from megatron_lightning.parallel.stored_weight import stored_weights
from megatron_lightning.precision.assignment import quantizable_layers
from megatron_lightning.precision.base_formats import BaseFormat
from megatron_lightning.precision.frozen_weight import FrozenWeight


@torch.no_grad()
def quantize_base(module: nn.Module, name: BaseFormat) -> list[str]:
    """Keep the frozen weights of linear layers and experts as quantized data and scales, in place,
    one layer at a time. Weights on ``meta`` are quantized when they get values.

    Output layers, routers, embeddings, norms, trained layers and weights that two layers share keep
    their values.

    Args:
        module: The full module.
        name: The format.

    Returns:
        Paths of the quantized layers.

    Raises:
        ConfigError: If there is nothing to quantize.
    """
    uses = num_names(module)
    paths = []
    for path in quantizable_layers(module):
        weight = module.get_submodule(path)._parameters.get("weight")
        # A weight of two layers would have two owners of one set of scales.
        if weight is None or weight.requires_grad or uses[id(weight)] > 1:
            continue
        rebind(weight, FrozenWeight.quantize(weight.detach(), name))
        paths.append(path)
    if not paths:
        raise ConfigError(
            f"base of LoRA is {name!r}, and {type(module).__name__} has no frozen linear layer "
            "that can be quantized (output layers and routers are not). Set base to None."
        )
    stacks = [
        f"{path}.{own}"
        for path, child in module.named_modules()
        for own in child._parameters
        if is_stack(child, own)
    ]
    if stacks:
        rank_zero_warn(
            f"base={name!r} of LoRA leaves {len(stacks)} stacks of experts in their values "
            f"({stacks[0]}), which are parameters and no layers. GPTLightningModule(init_from_hf="
            "...) keeps experts in few bits."
        )
    return paths


def check_values(module: nn.Module, doing: str) -> None:
    """Check that a module holds the values of its weights, and no rounded ones.

    Args:
        module: The module, or a rank's part.
        doing: What needs the values.

    Raises:
        ConfigError: Naming a weight in few bits.
    """
    for name, weight in stored_weights(module).items():
        raise ConfigError(
            f"{doing} needs the values of {name}, and base={getattr(weight, 'format', '')!r} of "
            "LoRA keeps quantized data of it. Save a checkpoint, and add the adapters to the "
            "base's own values: megatron-lightning adapters merge CHECKPOINT FOLDER."
        )
