"""Manual optimization with optimizers of shards or copies of the module's parameters.

``toggle_optimizer``: Lightning switches off ``requires_grad`` of the tensors in the other
optimizers' groups. If these tensors are shards, autograd would compute and the ranks would reduce
unwanted gradients. A parameter without a shard on a rank would stay on. The parameters themselves
are therefore toggled as well.

``zero_grad``: torch clears the gradients of the tensors in the optimizer's groups. If these tensors
are copies (in host memory, or full matrices), the copies have gradients only during a step, and the
reduced gradients are elsewhere. The module's ``zero_grad`` clears ``p.grad``, but shards have no
``p.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.step.gradients.gradient_guard import GradientGuard
from megatron_lightning.step.overrides import override, unwrapped


def follow_toggling(
    module: pl.LightningModule, accumulation: GradientAccumulation, undo: ExitStack
) -> None:
    """Toggle the parameters behind the optimizers' shards and copies as well, until ``undo`` is
    closed.
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


def follow_zero_grad(
    module: pl.LightningModule,
    optimizers: Iterable[Any],
    accumulation: GradientAccumulation,
    undo: ExitStack,
    guard: GradientGuard,
) -> None:
    """Clear the reduced gradients as well when the user clears gradients of an optimizer, the
    module or a sub-module, until ``undo`` is closed. ``guard`` does not refuse this change.
    """

    def clear(cleared: nn.Module, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with guard.own_change():
            original(*args, **kwargs)
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            targets = accumulation.reducer.targets()
            for parameter in cleared.parameters():
                # The gradient that will be stepped may lie on a shard, which the user's zero_grad
                # does not know.
                target = targets.get(names[id(parameter)])
                if target is not None:
                    target.grad = None

    for child in module.modules():
        override(child, "zero_grad", partial(clear, child), undo)
    # The optimizer and Lightning's wrapper are both in the hands of users.
    handed_out: Any = module.optimizers()  # Lightning's wrappers, a single wrapper without a list
    for optimizer in [*optimizers, *(handed_out if isinstance(handed_out, list) else [handed_out])]:
        if isinstance(unwrapped(optimizer), Optimizer):
            undo.callback(accumulation.view(unwrapped(optimizer)).follow_zero_grad(optimizer))
            vars(optimizer)["zero_grad"] = partial(_clear, optimizer.zero_grad, guard)


def _clear(zero_grad: Callable[..., None], guard: GradientGuard, *args: Any, **kwargs: Any) -> None:
    with guard.own_change():
        zero_grad(*args, **kwargs)
