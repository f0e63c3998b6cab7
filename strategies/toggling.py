"""``toggle_optimizer`` for optimizers that step shards or copies of the module's parameters.

Lightning switches off ``requires_grad`` of the tensors in the other optimizers' groups. Where those are shards, autograd
would compute and the ranks would reduce gradients that nobody wants; and of a parameter of which a rank has no shard, it
would not know that it is toggled off. So the parameters themselves follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import nn

from megatron_lightning.strategies.gradients import GradientFlow
from megatron_lightning.strategies.overrides import MethodOverrides


class Toggling:
    """Lets toggling reach the parameters that the optimizers were made for.

    Args:
        module: A LightningModule that optimizes manually; its methods are followed until :meth:`release`.
        gradients: Knows which optimizer steps which parameter.
    """

    def __init__(self, module: pl.LightningModule, gradients: GradientFlow) -> None:
        self._module, self._gradients = module, gradients
        self._off: list[nn.Parameter] = []
        self._overrides = MethodOverrides(module)
        self._overrides.put("toggle_optimizer", self._toggle)
        self._overrides.put("untoggle_optimizer", self._untoggle)

    def release(self) -> None:
        """Give the methods back."""
        self._overrides.give_back()

    def _toggle(self, original: Callable[..., None], optimizer: Any) -> None:
        original(optimizer)
        parameters: Mapping[str, nn.Parameter] = dict(self._module.named_parameters())
        for name in self._gradients.stepped_by_others(optimizer):
            if name in parameters and parameters[name].requires_grad:
                parameters[name].requires_grad = False
                self._off.append(parameters[name])

    def _untoggle(self, original: Callable[..., None], optimizer: Any) -> None:
        for parameter in self._off:
            parameter.requires_grad = True
        self._off.clear()
        original(optimizer)
