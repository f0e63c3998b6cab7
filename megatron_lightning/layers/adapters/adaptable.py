"""Make layers compute otherwise for a time: other GEMMs, another library, a split backward.

:func:`adapt` is the only place that replaces the computation of a layer, and :func:`restore` the
only place that undoes a replacement. The class of the layer declares what can be replaced, by a
class attribute with the default. torch's own layers declare nothing, so :func:`adapt` changes the
class of the layer in place. The object, its parameters, names and hooks stay.

    replacement      of                                    set for
    gemm             linear layers, experts                quantized GEMMs of a run
    engine           linear layers, experts, norms, MLPs,  another library's computation in a run
                     attention
    hidden_weight    linear layers, experts                deferred weight gradients of a fit
    awaited          linear layers                         losses of one call, without logits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.engine import Engine
from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.norm import LayerNorm, RMSNorm


class AdaptableRMSNorm(nn.RMSNorm):
    """An ``nn.RMSNorm`` with a place for an engine."""

    engine: Engine | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self.engine is not None and self.engine.takes(x):
            return self.engine(x)
        return super().forward(x)


class AdaptableModelRMSNorm(AdaptableRMSNorm, RMSNorm):
    """The RMSNorm of our models, with a place for an engine."""


class AdaptableLayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` with a place for an engine."""

    engine: Engine | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self.engine is not None and self.engine.takes(input):
            return self.engine(input)
        return super().forward(input)


class AdaptableModelLayerNorm(AdaptableLayerNorm, LayerNorm):
    """The LayerNorm of our models, with a place for an engine."""


REPLACEMENTS: Final = ("gemm", "engine", "hidden_weight", "awaited")
"""Attributes that replace a computation."""
_ADAPTABLE: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: AdaptableLinear,
    nn.RMSNorm: AdaptableRMSNorm,
    RMSNorm: AdaptableModelRMSNorm,
    nn.LayerNorm: AdaptableLayerNorm,
    LayerNorm: AdaptableModelLayerNorm,
}
_PLAIN: Mapping[type[nn.Module], type[nn.Module]] = {
    adaptable: plain for plain, adaptable in _ADAPTABLE.items()
}


def adaptable_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that :func:`adapt` gives a layer of class ``kind``."""
    return _ADAPTABLE.get(kind, kind)


def can_replace(layer: nn.Module, name: str) -> bool:
    """Return whether the class of a layer declares a replacement."""
    return hasattr(adaptable_class(type(layer)), name)


def adapt(layer: nn.Module, **replacements: Any) -> None:
    """Replace parts of a layer's computation, in place, until :func:`restore`.

    Args:
        layer: The layer.
        replacements: Values of ``REPLACEMENTS``.

    Raises:
        TypeError: If the class of the layer does not declare a replacement.
    """
    for name in replacements:
        if name not in REPLACEMENTS or not can_replace(layer, name):
            raise TypeError(f"{type(layer).__name__} declares no {name} to replace.")
    kind = adaptable_class(type(layer))
    if kind is not type(layer):
        change_class(layer, kind)
    for name, value in replacements.items():
        setattr(layer, name, value)


def restore(layer: nn.Module, *names: str) -> None:
    """Undo replacements. The class of torch's own layers returns with the last one.

    Args:
        layer: The layer, adapted or not.
        names: Replacements to undo.
    """
    attributes = vars(layer)
    for name in names:
        if can_replace(layer, name):  # else the attribute is the user's
            attributes.pop(name, None)
    plain_class = _PLAIN.get(type(layer))
    if plain_class is not None and not any(name in attributes for name in REPLACEMENTS):
        layer.__class__ = plain_class
