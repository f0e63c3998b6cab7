"""Logits as a rank holds them: losses over a vocabulary that is split over the ranks need no
gathered logits, also from an untouched model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron_lightning.layers.linear.parallel_linear import ColumnParallelLinear
from megatron_lightning.layers.losses.linear_loss import OutputLinear
from megatron_lightning.layers.losses.loss import ALONE, Vocabulary
from megatron_lightning.layers.styles.vocabulary import LogitsGather

_LOCAL = "_has_local_logits"


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer for a language model's logits. None: the model names none."""
    layer = getattr(model, "output_layer", None)
    if isinstance(layer, OutputLinear):
        return layer
    find = getattr(model, "get_output_embeddings", None)
    try:
        layer_found = None if find is None else find()
    except (AttributeError, NotImplementedError):
        return None
    return layer_found if isinstance(layer_found, nn.Module) else None


def are_local(model: nn.Module) -> bool:
    """Return whether the logits of a model stay split over the ranks for now."""
    return _LOCAL in vars(model)


@contextmanager
def local_logits(model: nn.Module) -> Iterator[Vocabulary]:
    """Leave the logits of a model split over the ranks inside the block, as the output layer
    computes them. Yield the vocabulary. A vocabulary without a split stays full.

    Args:
        model: A language model.
    """
    layer = output_layer(model)
    size = int(getattr(layer, "out_features", 0))
    if not isinstance(layer, ColumnParallelLinear) or layer.group.size == 1:
        yield Vocabulary(ALONE, size)
        return
    gathers = [child for child in model.modules() if isinstance(child, LogitsGather)]
    before = layer.gather_output
    layer.gather_output = False
    vars(model)[_LOCAL] = True
    for gather in gathers:
        gather.enabled = False
    try:
        yield Vocabulary(layer.group, size)
    finally:
        del vars(model)[_LOCAL]
        layer.gather_output = before
        for gather in gathers:
            gather.enabled = True
