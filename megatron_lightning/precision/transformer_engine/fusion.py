"""Find norms to fuse with the following layer.

A block names, in ``read_by``, norms with a single reader. The norm keeps the weight and returns the
input. The following module normalizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from megatron_lightning.layers.activation import SwiGLU
from megatron_lightning.layers.attention.self_attention import SelfAttention
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.norm import LayerNorm, RMSNorm
from megatron_lightning.precision.recipes import FP8Recipe

_FIRST_LINEAR: Mapping[type[nn.Module], str] = {SelfAttention: "linear_qkv", MLP: "linear_fc1"}


class Fusion(NamedTuple):
    """A norm and the following layer."""

    norm: str
    """Path of the norm."""
    target: str
    """Path of the normalizing linear or feed-forward layer."""
    activation: str | None
    """Transformer Engine's name of a feed-forward layer's activation.

    None: the target is linear.
    """


def find_fusions(
    present: Mapping[str, nn.Module], recipes: Mapping[str, FP8Recipe | None]
) -> list[Fusion]:
    """Return the fusions of a rank's part.

    Args:
        present: Modules by path.
        recipes: Recipes of the linear layers by path. None: bf16.
    """
    fusions = []
    for path, block in present.items():
        for norm_name, reader_name in getattr(block, "read_by", {}).items():
            norm, reader = present.get(f"{path}.{norm_name}"), present.get(f"{path}.{reader_name}")
            if norm is None or reader is None or not (has_engine(norm) and is_untouched(norm)):
                continue
            first = _FIRST_LINEAR.get(type(reader))
            target = f"{path}.{reader_name}"
            if first is None or recipes.get(f"{target}.{first}") is None:
                continue
            activation = _activation(reader, target, recipes)
            if activation is None:
                target = f"{target}.{first}"
            if activation is not None or is_untouched(present[target]):
                fusions.append(Fusion(f"{path}.{norm_name}", target, activation))
    return fusions


def has_engine(norm: nn.Module) -> bool:
    """Return whether Transformer Engine computes such a norm: with a weight, over the last dim."""
    return (
        type(norm) in (nn.RMSNorm, RMSNorm, nn.LayerNorm, LayerNorm)
        and norm.weight is not None
        and norm.eps is not None
        and len(norm.normalized_shape) == 1  # type: ignore[arg-type]
        and (isinstance(norm, nn.RMSNorm) or norm.bias is not None)
    )


def is_untouched(module: nn.Module) -> bool:
    """Return whether nothing else looks at a module's forward: recomputation, offload, hooks."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _activation(
    reader: nn.Module, path: str, recipes: Mapping[str, FP8Recipe | None]
) -> str | None:
    """Return Transformer Engine's name of the activation if Transformer Engine computes the full
    feed-forward layer, or None.
    """
    if not isinstance(reader, MLP):
        return None
    first, second = (recipes.get(f"{path}.{name}") for name in ("linear_fc1", "linear_fc2"))
    if first is None or first != second:
        return None
    if not all(map(is_untouched, reader.children())):
        return None
    if isinstance(reader.activation, SwiGLU):
        return "swiglu"
    # Transformer Engine's gelu is the tanh version.
    is_tanh = isinstance(reader.activation, nn.GELU) and reader.activation.approximate == "tanh"
    return "gelu" if is_tanh else None
