"""Losses of a call of an untouched ``transformers`` model in chunks, without the logits of all
tokens.

The output layer of the called model awaits the loss
(:mod:`megatron_lightning.layers.losses.lazy_logits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_lightning.layers.adapters.adaptable import adapt, can_replace, restore
from megatron_lightning.layers.adapters.adapter_layers import add_adapters
from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.losses.lazy_logits import AwaitedLoss, Habits, PendingLogits
from megatron_lightning.layers.losses.local_logits import output_layer
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.parallel.shards.other_stages import is_absent

_HABITS = "_logits_habits"
"""Attribute of a model: :class:`Habits` by whether gradients are computed."""


@contextmanager
def awaited_losses(model: Any, targets: Tensor, loss: nn.Module) -> Iterator[Losses]:
    """Make the output layer of a model await losses for ``targets``, in a call inside the block.

    Args:
        model: Causal language model of ``transformers``.
        targets: [b, s], already shifted.
        loss: Loss of logits and targets. Only a plain :class:`CrossEntropy` is computed in chunks.
    """
    awaited = None
    if type(loss) is CrossEntropy:
        awaited = AwaitedLoss(targets, habits_of(model), loss=loss)
    layer = None if awaited is None else begin_awaiting(model, awaited)
    try:
        yield Losses(targets, loss, is_awaited=layer is not None)
    finally:
        if awaited is not None:
            awaited.is_over = True
        if layer is not None:
            restore(layer, "awaited")


@dataclass(frozen=True)
class Losses:
    """Token losses of a call."""

    targets: Tensor
    loss: nn.Module
    is_awaited: bool
    """Whether the output layer awaits the loss. False: the layer computes logits."""

    def of(self, logits: Tensor) -> Tensor:
        """Return losses [b, s] of ``logits`` [b, s, v]."""
        if isinstance(logits, PendingLogits):
            return logits.pending.losses()
        losses: Tensor = self.loss(logits, self.targets)
        return losses


def habits_of(model: nn.Module) -> Habits:
    """Return how a model treats its logits, in training or in evaluation."""
    habits: dict[bool, Habits] = vars(model).setdefault(_HABITS, {})
    return habits.setdefault(model.training, Habits())


def begin_awaiting(model: Any, awaited: AwaitedLoss) -> nn.Module | None:
    """Make the output layer of a model await a loss, and return the layer. None: the layer computes
    logits as usual.
    """
    if awaited.habits.reads:
        return None
    layer: nn.Module | None = output_layer(model)
    if layer is None or is_absent(layer):
        return None
    if isinstance(layer, FSDPModule) and type(layer).forward is nn.Linear.forward:
        change_class(layer, AdaptableLinear)  # FSDP2 has made a subclass of nn.Linear
    if not can_replace(layer, "awaited"):
        return None
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    has_hooks = any(hook is add_adapters or not is_library(hook) for hook in hooks)
    is_other = getattr(layer, "engine", None) is not None
    gemm = getattr(layer, "gemm", None)
    is_other |= gemm is not None and not gemm.differentiable
    is_sharded = getattr(layer, "gather_output", True) is False
    if has_hooks or layer._backward_hooks or layer._backward_pre_hooks or is_other or is_sharded:
        return None
    awaited.habits.begin_call()
    awaited.can_repeat = not isinstance(layer, FSDPModule)
    adapt(layer, awaited=awaited)
    return layer
