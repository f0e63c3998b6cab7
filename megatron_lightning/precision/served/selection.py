"""Select the layers that servers hold in few bits: linear layers and experts in the blocks of the
language model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from megatron_lightning.layers.adapters.stacked_adapters import is_stack
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.precision.assignment import quantizable_layers

_IN_BLOCK = re.compile(r"(?:^|\.)([^.\d][^.]*\.\d+)(\..+)$")


class Served(NamedTuple):
    """Layers of a model."""

    layers: list[str]
    """Paths of linear layers and of experts with a layer of their own."""
    stacks: dict[str, tuple[str, ...]]
    """Path of a module -> its parameters with a matrix [out, in] of each expert."""


def place_in_block(path: str) -> tuple[str, str]:
    """Return block and rest of a path, such as ("layers.3", ".mlp.up_proj"). Empty: no block."""
    match = _IN_BLOCK.search(path)
    return ("", path) if match is None else (match[1], match[2])


def served_in(model: nn.Module) -> Served:
    """Return the layers of a full model that are rounded by default."""
    modules = dict(model.named_modules())
    prefix = _text_prefix(modules, getattr(model, "config", None))
    layers = [
        path
        for path in quantizable_layers(model)
        if path.startswith(prefix) and isinstance(modules[path], nn.Linear | GroupedLinear)
    ]
    # A model without a list of blocks, such as one of your own, has all of them rounded.
    layers = [path for path in layers if place_in_block(path)[0]] or layers
    stacks = {
        path: names
        for path, module in modules.items()
        if path.startswith(prefix) and not getattr(module, "is_transposed", False)
        if (names := tuple(name for name in module._parameters if is_stack(module, name)))
    }
    return Served(layers, stacks)


def _text_prefix(modules: Mapping[str, nn.Module], config: Any) -> str:
    """Return the path of the language model, with a dot. Empty: the model is one."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is config:
        return ""
    kind = type(text)
    of_text = (path for path, x in modules.items() if isinstance(getattr(x, "config", None), kind))
    return next((f"{path}." for path in of_text if path), "")
