"""Make the linear layers of a model defer their weight gradients
(:mod:`megatron_lightning.layers.linear.splittable`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn

from megatron_lightning.layers.adapters.adaptable import adapt, can_replace, restore
from megatron_lightning.layers.linear.splittable import HiddenWeight, Splittable
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.pipeline.weight_gradients import WeightGradients


def split_backwards(root: nn.Module, store: WeightGradients) -> tuple[list[str], list[str]]:
    """Make all linear layers in ``root`` defer their weight gradients to ``store``.

    Returns:
        Names of the deferring modules, and of other modules with matrix parameters: layers of other
        kinds, and subclasses of ``nn.Linear`` with any forward. Embeddings are in neither list.
    """
    split, unsplit = [], []
    for name, module in present_modules(root):
        if can_replace(module, "hidden_weight") and getattr(module, "engine", None) is None:
            adapt(module, hidden_weight=HiddenWeight(cast(Splittable, module), store))
            split.append(name)
        elif not isinstance(module, nn.Embedding) and any(
            p.ndim > 1 and p.requires_grad for p in module.parameters(recurse=False)
        ):
            unsplit.append(name)
    return split, unsplit


def join_backwards(root: nn.Module) -> None:
    """Undo :func:`split_backwards`."""
    for module in root.modules():
        restore(module, "hidden_weight")


def hide_quantized(layers: Iterable[Splittable], store: WeightGradients) -> None:
    """Hide quantized weights from compiled graphs, because a graph would round gradients to the
    dtype of the quantized data. Repeat whenever the weights' memory changes.
    """
    for layer in layers:
        if layer.hidden_weight is None:
            hidden = HiddenWeight(layer, store, defers=False)
            adapt(cast(nn.Module, layer), hidden_weight=hidden)
        else:
            layer.hidden_weight.renew()
