"""The only file that knows versions: one name for what torch 2.11 to 2.13 call differently."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "PrefixStore",
    "Store",
    "abort_process_groups",
    "all_gather",
    "allow_any_grad_dtype",
    "at_end_of_main_thread",
    "default_store",
    "finish_fsdp_backward",
    "fsdp_parameters",
    "keep_fsdp_gradients_in_reduce_dtype",
    "never_drop",
    "reduce_scatter",
    "run_backward",
    "saved_tensors_hooks_in_force",
    "silence_treespec_warning",
]


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Sum ``input`` (1-D, n x m) over ``group`` and keep this rank's m elements in ``output``, which may be that slice.

    torch 2.13 names the collective ``reduce_scatter_single`` and deprecates the older name.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Concatenate every rank's ``input`` (m elements) into ``output`` (n x m); ``input`` may be this rank's slice of it.

    torch 2.13 names the collective ``all_gather_single`` and deprecates the older name.
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


def silence_treespec_warning() -> None:
    """Leave out a warning of torch 2.13 to Lightning's loops, which every rank prints and no user can act on."""
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)


def allow_any_grad_dtype(parameter: torch.nn.Parameter) -> None:
    """Let ``parameter.grad`` have another dtype than the parameter, so that autograd adds bf16 gradients to an fp32 one."""
    parameter.grad_dtype = None


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Back-propagate one gradient from each root: ``torch.autograd.backward`` without its slow checks of arguments.

    The engine itself checks shapes and dtypes.
    """
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the (pack, unpack) hooks that saved tensors go through now; hooks set inside them take their place, not a turn."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def never_drop(operator: torch._ops.OpOverload) -> None:
    """Let compilers run ``operator`` as often and in the order that the traced program does, though nobody reads its result.

    torch 2.11 to 2.13 have this for operators under private names only.
    """
    _register_effectful_op(operator, _EffectType.ORDERED)


def default_store() -> Store:
    """Return a connection of its own to the default process group's store, usable while another thread waits on that store."""
    store: Any = dist.distributed_c10d._get_default_store()
    connection: Store = store.clone()
    return connection


def abort_process_groups() -> None:
    """Break this rank's connections, so that peers that wait for it fail at once where the backend can do that.

    gloo cannot: its connections close with the process. The groups are never taken apart, because gloo's destructor waits
    for what is under way, and with it the end of this process for messages of ranks that wait for its end.
    """
    if not dist.is_initialized():
        return
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def at_end_of_main_thread(function: Callable[[], None]) -> None:
    """Call ``function`` in this process when its main thread has come to its end, before what ``atexit`` knows.

    Its exit code can still be another one then, without any exit function being left out.
    """
    owner = os.getpid()
    threading._register_atexit(lambda: function() if os.getpid() == owner else None)  # type: ignore[attr-defined]


def finish_fsdp_backward(root: FSDPModule) -> None:
    """Reduce what the units under ``root`` have accumulated and not yet reduced, and wait for it.

    FSDP2 does this at the end of a backward pass that autograd runs as a whole, and has no public name for it; torch's own
    pipeline stages call the same.
    """
    state: Any = root._get_fsdp_state()
    for unit in state._state_ctx.all_states:
        if unit._fsdp_param_group is not None:
            unit._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()


def fsdp_parameters(unit: FSDPModule) -> list[tuple[Tensor, Tensor]]:
    """Return (sharded, whole) for every parameter of a unit; a collective.

    The whole ones are the leaves of autograd. They exist from the first all-gather on and stay the same objects, whose
    memory comes and goes.
    """
    state: Any = unit._get_fsdp_state()
    unit.unshard()
    pairs = [(parameter.sharded_param, parameter.unsharded_param) for parameter in state._fsdp_param_group.fsdp_params]
    unit.reshard()
    return pairs


def keep_fsdp_gradients_in_reduce_dtype(unit: FSDPModule) -> None:
    """Add each gradient of the unit's whole parameters to a sum in the reduction's dtype as soon as it appears.

    FSDP2 does so once for every backward pass; weight gradients that are put off arrive outside of one, and several of them
    would be summed in bf16. A collective.
    """
    fsdp_parameters(unit)
    state: Any = unit._get_fsdp_state()
    for parameter in state._fsdp_param_group.fsdp_params:
        if parameter.sharded_param.requires_grad:

            def add(_: Tensor, parameter: Any = parameter) -> None:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

            parameter._unsharded_param.register_post_accumulate_grad_hook(add)
