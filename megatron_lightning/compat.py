"""The only file that knows versions of torch: one name for what 2.11 to 2.13 call differently or have under private names."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.graph import GradientEdge, _engine_run_backward

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "FsdpUnit",
    "GradientHooks",
    "PrefixStore",
    "Store",
    "abort_process_groups",
    "all_gather",
    "allow_any_grad_dtype",
    "at_end_of_backward",
    "at_end_of_main_thread",
    "avoid_fused_inference",
    "backward_pass",
    "default_store",
    "finish_fsdp_backward",
    "keep_freed_memory",
    "never_drop",
    "reduce_scatter",
    "run_backward",
    "saved_tensors_hooks_in_force",
    "silence_treespec_warning",
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


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


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees, up to 2 GiB at the heap's end, for the next one.

    Else it may return it to the kernel every time, which then hands out every page anew. ``MALLOC_TRIM_THRESHOLD_`` in the
    environment goes first; other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # where glibc's own ends that grows with use, and would not any more


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


def is_connected(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is one of those that :func:`abort_process_groups` has not broken."""
    return group in dist.distributed_c10d._world.pg_map


def at_end_of_main_thread(function: Callable[[], None]) -> None:
    """Call ``function`` in this process when its main thread has come to its end, before what ``atexit`` knows.

    Its exit code can still be another one then, without any exit function being left out.
    """
    owner = os.getpid()
    threading._register_atexit(lambda: function() if os.getpid() == owner else None)  # type: ignore[attr-defined]


def finish_fsdp_backward(root: FSDPModule) -> None:
    """Reduce what the units under ``root`` have accumulated and not yet reduced, the last unit first, and wait for it.

    FSDP2 does this at the end of a backward pass that autograd runs as a whole, and has no public name for it; torch's own
    pipeline stages call the same.
    """
    state: Any = root._get_fsdp_state()
    if not state._is_root:  # it has never run, or as a part of another root
        return
    for unit in reversed(state._state_ctx.all_states):
        if unit._fsdp_param_group is not None:
            unit._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()


def backward_pass() -> int:
    """Return a number that each backward pass has to itself; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that runs now has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class FsdpUnit:
    """What torch keeps to itself of a module that ``fully_shard`` shards.

    Args:
        module: The module.
    """

    def __init__(self, module: FSDPModule) -> None:
        state: Any = module._get_fsdp_state()
        self.module: Any = module
        self._group = state._fsdp_param_group

    @property
    def is_reducing(self) -> bool:
        """Whether the backward pass that runs now ends with a reduction."""
        return bool(self._group.reduce_grads)

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Give the parameters that were sharded on ``meta`` memory, which is not filled; return the sharded ones."""
        allocated = []
        for parameter in self._group.fsdp_params:
            if not parameter.sharded_param.is_meta:
                continue
            # The rows that fill up the last ranks' shards stay with them: torch would move shards without to other memory.
            padded = torch.zeros(parameter.padded_sharded_param_size, dtype=parameter.sharded_param.dtype, device=device)
            rows = padded.narrow(0, 0, parameter.sharded_size[0] if parameter.sharded_size.numel() else 0)
            trained = parameter.sharded_param.requires_grad
            parameter._sharded_param_data = padded.view(-1)
            parameter.sharded_param = nn.Parameter(parameter.to_sharded_dtensor(rows), requires_grad=trained)
            parameter._setattr_on_modules(parameter.sharded_param)
            allocated.append(parameter.sharded_param)
        return allocated

    def parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return (sharded, whole) for every parameter.

        The whole ones are the leaves of autograd. They stay the same objects, whose memory comes and goes with the gathers.
        """
        self._group.lazy_init()
        for parameter in self._group.fsdp_params:
            if not hasattr(parameter, "_unsharded_param"):
                dtype, ranks = parameter.param_dtype or parameter.orig_dtype, parameter.mesh_info.shard_mesh_size
                numel = parameter._sharded_param_data.numel()
                parameter.init_all_gather_outputs([numel], [dtype], ranks, self._group.device)
                parameter.init_unsharded_param()
                parameter.free_unsharded_param()
        return [(parameter.sharded_param, parameter._unsharded_param) for parameter in self._group.fsdp_params]

    def wrap_backward(self, before: Callable[[Callable[[], None]], None], after: Callable[[Callable[[], None]], None]) -> None:
        """Put functions around what happens before and after the unit's backward; they are given what FSDP2 does there."""
        gather, reduce = self._group.pre_backward, self._group.post_backward

        def pre_backward(*_: Any) -> None:
            before(lambda: gather(False))  # True: with what FSDP2 takes for the unit that comes next

        def post_backward(*args: Any) -> None:
            after(lambda: reduce(*args))

        self._group.pre_backward, self._group.post_backward = pre_backward, post_backward

    def gather_ahead(self) -> None:
        """Begin to gather the parameters for a backward, unless they are here."""
        self._group._prefetch_unshard(self._group, "backward")

    def begin_backward(self) -> None:
        """Do what happens when a backward pass reaches the unit."""
        self._group.pre_backward()

    def end_backward(self) -> None:
        """Do what happens when a backward pass has left the unit."""
        self._group.post_backward()

    def fill_gradients(self) -> list[Tensor]:
        """Give trainable parameters that have no gradient zeros; return their sharded parameters."""
        filled = []
        for parameter in self._group.fsdp_params:
            whole = parameter._unsharded_param
            if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
                zeros = torch.zeros(whole.shape, dtype=parameter.reduce_dtype or whole.dtype, device=whole.device)
                parameter.unsharded_accumulated_grad = zeros
                filled.append(parameter.sharded_param)
        return filled

    def sum_in_reduce_dtype(self) -> None:
        """Add each gradient of the whole parameters to a sum in the reduction's dtype as soon as it appears.

        FSDP2 does so once for every backward pass; weight gradients that are put off arrive outside of one, and several of
        them would be summed in bf16.
        """
        for parameter in self._group.fsdp_params:

            def add(_: Tensor, parameter: Any = parameter) -> None:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

            if parameter.sharded_param.requires_grad:
                parameter._unsharded_param.register_post_accumulate_grad_hook(add)

    def send_gradients_as(self, dtype: torch.dtype) -> None:
        """Reduce gradients in another dtype than they are summed in over micro-batches, which FSDP2 has one setting for."""
        group, decide = self._group, self._group._init_mp_dtypes

        def decided() -> None:
            decide()
            if group._orig_dtype is not None:
                group._reduce_dtype = dtype

        group._init_mp_dtypes = decided
        decided()


class GradientHooks:
    """The hooks of a parameter that others take the place of.

    Args:
        parameter: The parameter; it is not kept.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._hooks: Any = parameter._backward_hooks
        self._accumulated: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)

    def move(self, leaf: Tensor, *others: Tensor) -> None:
        """Let ``leaf`` have the parameter's hooks, and those that anybody registers on any of the tensors from now on."""
        hooks = OrderedDict() if self._hooks is None and others else self._hooks
        if hooks is not None:
            for tensor in (leaf, *others):
                tensor._backward_hooks = hooks
        if self._accumulated:
            leaf._post_accumulate_grad_hooks = self._accumulated


def avoid_fused_inference(model: nn.Module) -> None:
    """Let torch's encoder layers call their submodules in inference too, instead of handing the weights to one kernel.

    Past the calls of linear layers that hold shards, the kernel would leave out what the other ranks have.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
