"""``toggle_optimizer`` for optimizers that step shards or copies of the module's parameters.

Lightning switches off ``requires_grad`` of the tensors in the other optimizers' groups. Where those are shards, autograd would
compute and the ranks would reduce gradients that nobody wants; and a parameter of which a rank has no shard would stay on. So
the parameters themselves follow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from megatron_lightning.optim.accumulation import GradientAccumulation
from megatron_lightning.strategies.step.overrides import override


def unwrapped(optimizer: Any) -> Any:
    """Return the user's optimizer, which Lightning hands out in a wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def follow_toggling(module: pl.LightningModule, accumulation: GradientAccumulation, undo: ExitStack) -> None:
    """Let toggling reach the parameters that the optimizers were made for, until ``undo`` is closed.

    Args:
        module: A LightningModule that optimizes manually.
        accumulation: Knows which optimizer steps which parameter.
        undo: Restores the module's methods.
    """
    off: list[nn.Parameter] = []

    def toggle(original: Callable[..., None], optimizer: Any) -> None:
        original(optimizer)
        parameters = dict(module.named_parameters())
        for name in accumulation.stepped_by_others(unwrapped(optimizer)):
            if name in parameters and parameters[name].requires_grad:
                parameters[name].requires_grad = False
                off.append(parameters[name])

    def untoggle(original: Callable[..., None], optimizer: Any) -> None:
        for parameter in off:
            parameter.requires_grad = True
        off.clear()
        original(optimizer)

    override(module, "toggle_optimizer", toggle, undo)
    override(module, "untoggle_optimizer", untoggle, undo)
