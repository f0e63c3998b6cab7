"""Rounded inputs of layers whose weights have rounded values: trained models, to be evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adaptable import adapt
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.precision.served.gemm import ServedGemm
from megatron_lightning.precision.served.input_scales import InputScales
from megatron_lightning.precision.served.rounding import Rounding
from megatron_lightning.precision.served.values import ServedFormat


class LayerInputs(NamedTuple):
    """Formats and fixed scales of the inputs of a model's layers."""

    forms: Mapping[str, ServedFormat] = MappingProxyType({})
    """Path of a layer -> format."""
    amax: Mapping[str, float] = MappingProxyType({})
    """Path of a layer -> largest input of a fixed scale."""
    is_fixed: bool = False
    """Whether scales are fixed. False: they are found at run time."""

    def renamed(self, owners: Mapping[str, Iterable[str]]) -> LayerInputs:
        """Return the inputs of another model with the same weights.

        Args:
            owners: Path of a layer there -> paths of the layers here with the rows of its weight.

        Raises:
            ConfigError: If a layer there has inputs of several scales or formats.
        """
        forms, amax = {}, {}
        for path, own in owners.items():
            found = {(self.forms.get(name), self.amax.get(name)) for name in own}
            if len(found) > 1:
                raise ConfigError(
                    f"the inputs of {', '.join(sorted(own)[:2])} and others, which are one layer "
                    f"of a GPTModel, were trained with {len(found)} scales or formats"
                )
            form, largest = next(iter(found), (None, None))
            if form is not None:
                forms[path] = form
            if largest is not None:
                amax[path] = largest
        return LayerInputs(forms, amax, self.is_fixed)

    def apply(self, model: nn.Module) -> nn.Module:
        """Round the inputs of a full model's layers, in place. Return the model."""
        scales = InputScales(self.forms) if self.is_fixed else None
        if scales is not None:
            scales.amax = dict(self.amax)
        rounding, modules = Rounding(scales), dict(model.named_modules())
        for path, form in self.forms.items():
            layer: Any = modules[path]
            one_by_one = layer.gemm.one_by_one if isinstance(layer, GroupedLinear) else False
            gemm = ServedGemm(
                form,
                path,
                (layer,),
                rounding,
                one_by_one=one_by_one,
                rounds_inputs=True,
                rounds_weight=False,
            )
            adapt(layer, gemm=gemm)
        return model


NOT_ROUNDED = LayerInputs()
"""No layer rounds its inputs."""
