"""Backward passes, hooks and gradients of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before a step of ``optimizer``, in order, since torch has no public list."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def set_grad_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> None:
    """Set the dtype to which autograd casts the parameter's gradients before adding them. None: no
    cast.
    """
    parameter.grad_dtype = dtype


def set_gather_hooks(
    shard: DTensor, pre_all_gather: Callable[..., Any], post_all_gather: Callable[..., Any]
) -> None:
    """Make FSDP2 gather the results of ``pre_all_gather`` in place of ``shard``.

    FSDP2 looks for the hooks on the local tensor, and again before the first gather ("allow monkey
    patch after init", torch 2.11 to 2.13). Public methods of DTensor return only a view of the
    local tensor.
    """
    local_tensor: Any = shard._local_tensor
    local_tensor.fsdp_pre_all_gather = pre_all_gather
    local_tensor.fsdp_post_all_gather = post_all_gather


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Back-propagate a gradient from each root: ``torch.autograd.backward`` without the slow checks
    in Python.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def saved_tensors_hooks_in_force() -> (
    tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
):
    """Return the current (pack, unpack) hooks of saved tensors. Hooks set inside replace the
    current hooks.
    """
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(False)
    )
    return hooks


def is_in_backward() -> bool:
    """Return whether autograd's engine runs on this thread, as in a recomputed forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def pop_function_mode(mode: TorchFunctionMode) -> bool:
    """Leave a mode of torch functions for a while, if the mode is the innermost. Return whether
    the mode was left.
    """
    if _get_current_function_mode() is not mode:  # type: ignore[no-untyped-call]
        return False
    _pop_mode()  # type: ignore[no-untyped-call]
    return True


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Enter a mode again."""
    _push_mode(mode)  # type: ignore[no-untyped-call]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class GradientHooks:
    """Hooks of a parameter, to move to a replacing tensor. The parameter itself is not kept."""

    def __init__(self, parameter: Tensor) -> None:
        self._hooks: Any = parameter._backward_hooks
        self._accumulated: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)

    def __iter__(self) -> Iterator[Any]:
        for hooks in (self._hooks, self._accumulated):
            yield from (hooks or {}).values()

    def __bool__(self) -> bool:
        return bool(self._hooks or self._accumulated)

    def move(self, leaf: Tensor, *others: Tensor) -> None:
        """Share the parameter's hooks with ``leaf`` and ``others``, including hooks registered
        later on any of the tensors.
        """
        hooks = OrderedDict() if self._hooks is None and others else self._hooks
        if hooks is not None:
            for tensor in (leaf, *others):
                tensor._backward_hooks = hooks
        accumulated = OrderedDict() if self._accumulated is None and others else self._accumulated
        if accumulated is not None:
            for tensor in (leaf, *others):
                tensor._post_accumulate_grad_hooks = accumulated


def run_behind(
    parameter: Tensor, handle: RemovableHandle, is_awaited: Callable[[object], bool]
) -> None:
    """Make a hook on the accumulated gradient run after the hooks that ``is_awaited`` names,
    whatever the order of registration. Further hooks behind the hook stay behind.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    if next(reversed(hooks)) == handle.id:
        return
    order = list(hooks)
    behind = order[order.index(handle.id) + 1 :]
    if any(is_awaited(hooks[number]) for number in behind):
        for number in (handle.id, *(n for n in behind if not is_awaited(hooks[n]))):
            hooks[number] = hooks.pop(number)  # torch goes by the order of insertion


def run_last(parameter: Tensor, handle: RemovableHandle) -> None:
    """Make a hook on the accumulated gradient run after all other hooks, whatever the order of
    registration.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    if next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the order of insertion
