"""One name for each call that torch 2.11 to 2.13 name differently or keep private, and for what
Python and the C library keep so; the only file that knows versions.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

HashStore = _distributed_c10d.HashStore
PrefixStore = _distributed_c10d.PrefixStore
Store = _distributed_c10d.Store

_MAX_GRAPHS = 64
"""Of blocks that share code: kinds of layers x training, validation and inference x static and
dynamic shapes x recomputed or not. torch stops at 8, and runs the rest uncompiled."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_FINISH_S = 10.0  # for gloo's threads to finish at the end of a job, on a busy machine
# A collective under way may wait for ranks that wait for the end of this process.
_FINISH_AFTER_ABORT_S = 0.2


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Sum ``input`` (1-D, n x m) over ``group`` and keep this rank's m elements in ``output``,
    which may be that slice.

    torch 2.13 names the collective ``reduce_scatter_single`` and deprecates the older name.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Concatenate every rank's ``input`` (m elements) into ``output`` (n x m); ``input`` may be
    this rank's slice of it.

    torch 2.13 names the collective ``all_gather_single`` and deprecates the older name.
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


_COLLECTIVES = ("all", "_all", "broadcast", "reduce", "_reduce", "gather", "scatter", "barrier")
"""Beginnings of the names of a process group's methods that are collectives."""


class _WatchedGroup(dist.ProcessGroup):
    """A process group in the place of another one, which hands the names of collectives to a
    function before they are called.
    """

    def __init__(self, group: dist.ProcessGroup, called: Callable[[str], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        object.__setattr__(self, "_watched", group)
        object.__setattr__(self, "_called", called)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if name.startswith(_COLLECTIVES) or name == "monitored_barrier":
            object.__getattribute__(self, "_called")(name.lstrip("_"))
        return getattr(object.__getattribute__(self, "_watched"), name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is object.__getattribute__(self, "_watched")

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_watched"))  # keys torch's tables of groups


@contextmanager
def watched_default_group(called: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call ``called`` with the name of every collective that Python code begins
    on the default process group. A reference to the group from before works as ever.
    """
    group = dist.group.WORLD
    if group is None:
        yield
        return
    distributed_c10d._world.default_pg = _WatchedGroup(group, called)
    try:
        yield
    finally:
        if dist.group.WORLD is not None:  # not destroyed in the block
            distributed_c10d._world.default_pg = group


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has begun on a group, whatever their devices."""
    backends: set[Any] = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether collectives of a group take tensors on the CPU."""
    return torch.device("cpu") in group._device_types


def takes_grouped_mm(x: Tensor) -> bool:
    """Return whether ``F.grouped_mm`` takes ``x`` [..., m, n] as an operand: by device, dtype and
    alignment (torch 2.11 to 2.13).

    On GPUs that is bf16, for which it has a kernel. For other dtypes it loops there, too.
    """
    if x.device.type == "cuda":
        known = x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    else:
        known = x.device.type == "cpu" and x.dtype in {torch.float32, torch.bfloat16, torch.float16}
    row, column = x.stride()[-2:]
    pitch_bytes = (row if column == 1 else column if row == 1 else 1) * x.element_size()
    return known and pitch_bytes % 16 == 0 and x.data_ptr() % 16 == 0


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Multiply FP8 codes a [m, k] by b [k, n], column-major, with fp32 scales of tensors ([], [])
    or of rows ([m, 1], [1, n]).

    The private name is the one that every torch of 2.11 to 2.13 has on CPUs and GPUs, and that its
    compiler knows; ``F.scaled_mm`` follows device by device.
    """
    y: Tensor = torch._scaled_mm(
        a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )
    return y


def scaled_mm_of_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, dtype: torch.dtype, square: bool
) -> Tensor:
    """Multiply FP8 codes a [m, k] by b [k, n], column-major, with fp32 scales of 128 codes along k,
    or, of b, of 128 x 128 (``square``).

    Args:
        a: Left codes; k is a multiple of 128.
        b: Right codes; n is a multiple of 128 with square blocks.
        scale_a: [m, k / 128], column-major.
        scale_b: [n, k / 128], column-major; of square blocks [k / 128, n / 128], column-major, its
            first dim padded to a multiple of 4.
        dtype: Dtype of the result.
        square: Whether a scale of b covers 128 x 128 codes.
    """
    kinds = F.ScalingType
    of_b = kinds.BlockWise128x128 if square else kinds.BlockWise1x128
    y: Tensor = F.scaled_mm(a, b, scale_a, kinds.BlockWise1x128, scale_b, of_b, output_dtype=dtype)
    return y


def takes_scaled_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Return whether :func:`scaled_grouped_mm` has a kernel for these codes: e4m3, on Hopper (torch
    2.11 to 2.13).
    """
    known = a.dtype is torch.float8_e4m3fn and b.dtype is torch.float8_e4m3fn
    return known and a.device.type == "cuda" and torch.cuda.get_device_capability(a.device)[0] == 9


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *, fast: bool = False
) -> Tensor:
    """Multiply e4m3 codes of every expert, with fp32 scales of rows; the result is bf16.

    Args:
        a: [t, k], or [m, t].
        b: [E, k, n] or [t, n], column-major.
        scale_a: [t], or [E m] for the rows of one expert after the other's.
        scale_b: [E, n], or [E n].
        ends: Where the tokens of every expert end [E], int32; multiples of 16 where tokens are
            contracted.
        fast: Whether Hopper may add up with fewer bits.
    """
    y: Tensor = torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y


def attention_choice(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool) -> int:
    """Return the number, in ``torch.nn.attention.SDPBackend``, of the kernels that
    ``F.scaled_dot_product_attention`` would run now.

    torch 2.11 to 2.13 have no public name for its choice.

    Raises:
        RuntimeError: If it would run none; torch warns of the reasons.
    """
    grouped = q.shape[1] != k.shape[1]
    return int(
        torch._fused_sdp_choice(
            q, k, v, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=grouped
        )
    )


def silence_treespec_warning() -> None:
    """Hide a warning of torch 2.13 about Lightning's loops, which every rank prints and no user can
    act on.
    """
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
    )


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, up to 2 GiB at the heap's end, for the next
    step.

    Otherwise it may return the memory to the kernel, which maps every page again.
    ``MALLOC_TRIM_THRESHOLD_`` in the environment takes precedence; other C libraries are not
    changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        # The limit of glibc's own, which stops growing once either is set.
        mallopt(_M_MMAP_THRESHOLD, 2**25)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile(function, **options)`` with a higher limit of graphs.

    torch 2.13 has the limit as an option; before, it is read when a call compiles.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _MAX_GRAPHS
    run: Callable[..., Any] = torch.compile(function, **options)
    if "recompile_limit" in options:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
            return run(*args, **kwargs)

    return call


def cpp_compilers() -> list[str]:
    """Return the names of the C++ compilers that inductor looks for."""
    from torch._inductor import config

    return [name for name in config.cpp.cxx if name]


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before a step of ``optimizer``, in their order; torch has no public list."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def set_grad_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> None:
    """Set the dtype to which autograd casts the parameter's gradients before it adds them; None: no
    cast.
    """
    parameter.grad_dtype = dtype


def fused_adamw(groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Return an AdamW that steps all parameters by one kernel, where torch has it for their device.

    torch marks its fused optimizers as able to divide gradients by a loss scale in their step.
    Lightning then leaves that to them and refuses to clip gradients; without the mark gradients are
    unscaled, and clipped, before the step.
    """
    known = {"meta", *torch.utils._foreach_utils._get_fused_kernels_supported_devices()}
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    optimizer = torch.optim.AdamW(groups, fused=True if devices <= known else None, **options)
    optimizer._step_supports_amp_scaling = False
    return optimizer


def set_gather_hooks(
    shard: DTensor, pre_all_gather: Callable[..., Any], post_all_gather: Callable[..., Any]
) -> None:
    """Make FSDP2 gather what ``pre_all_gather`` returns in place of ``shard``.

    It looks for the hooks on the local tensor, and again before its first gather ("allow monkey
    patch after init", torch 2.11 to 2.13), which a method of DTensor returns a view of only.
    """
    local: Any = shard._local_tensor
    local.fsdp_pre_all_gather = pre_all_gather
    local.fsdp_post_all_gather = post_all_gather


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Back-propagate one gradient from each root: ``torch.autograd.backward`` without its slow
    checks in Python.
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
    """Return the current (pack, unpack) hooks of saved tensors, which hooks set inside them
    replace.
    """
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(False)
    )
    return hooks


def is_in_backward() -> bool:
    """Return whether autograd's engine runs on this thread, as in a recomputed forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def never_drop(operator: torch._ops.OpOverload) -> None:
    """Mark ``operator`` as effectful: compilers keep every call of it, in order, though its result
    is unused.
    """
    _register_effectful_op(operator, _EffectType.ORDERED)


def default_store() -> Store:
    """Return a new connection to the default process group's store, usable while another thread
    waits on that store.
    """
    connection: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return connection


def destroy_process_groups() -> None:
    """Destroy all process groups with their connections and threads, also those that are still
    referenced.

    No work of a group may outlive the main thread: gloo's threads release the tensors of a finished
    collective shortly after the call has returned, and a release while the interpreter shuts down
    aborts the process.
    """
    if dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        _release_backends(groups, _FINISH_S)


def _release_backends(groups: Iterable[dist.ProcessGroup], within_s: float) -> None:
    """Release the backends of ``groups``, for which gloo joins its threads; wait at most
    ``within_s`` seconds.
    """
    # Python has no call for this: with gloo, ProcessGroup.shutdown() and abort() leave the threads
    # running (measured with torch 2.13), and torch joins them when the last reference to a group is
    # gone, but users' globals, modules and meshes hold some. So the C++ method that drops a group's
    # backends, ProcessGroup::release_resources, is called by its mangled name on the group's
    # address, which _id() returns. Where a build of torch lacks either, nothing is done: the
    # threads run on, and the process may abort at its end, after all results are written.
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    except OSError:  # another platform, or another layout of the package
        return
    drop_backends = getattr(library, "_ZN4c10d12ProcessGroup17release_resourcesEv", None)
    if drop_backends is None or not hasattr(dist.ProcessGroup, "_id"):
        return

    # Its frame keeps the group, whose destructor would wait as well.
    def release(group: dist.ProcessGroup) -> None:
        drop_backends(ctypes.c_void_p(group._id()))  # type: ignore[attr-defined]

    threads = [
        threading.Thread(target=release, args=(group,), name="release-group", daemon=True)
        for group in groups
    ]
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def abort_process_groups() -> None:
    """Break this rank's connections, so that peers that wait for it fail at once, where the backend
    supports that.

    gloo's connections stay until the end of the main thread: its destructor waits for collectives
    in flight, and so this process would wait for ranks that wait for its end.
    """
    if not dist.is_initialized():
        return
    groups = list(dist.distributed_c10d._world.pg_map)
    at_end_of_main_thread(partial(_release_backends, groups, _FINISH_AFTER_ABORT_S), last=True)
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def flight_records() -> list[dict[str, Any]]:
    """Return what torch's flight recorder has of this rank's last collectives, the oldest first;
    empty where nothing is recorded.

    It is on by default; ``TORCH_FR_BUFFER_SIZE`` (older: ``TORCH_NCCL_TRACE_BUFFER_SIZE``) sets how
    many it keeps. With gloo it records, and the state of a collective stays "scheduled".
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump()).get("entries", [])
        except (RuntimeError, TypeError, ValueError):
            continue
        if entries:
            return list(entries)
    return []


def is_connected(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has not been destroyed or broken by :func:`abort_process_groups`."""
    return group in dist.distributed_c10d._world.pg_map


def at_end_of_main_thread(function: Callable[[], None], *, last: bool = False) -> None:
    """Call ``function`` in this process at the end of its main thread, before the functions of
    ``atexit``.

    The function may still change the exit code, and no exit function is skipped.

    Args:
        function: Function to call.
        last: Whether to call it after all others that are registered this way, also by the pools of
            ``concurrent.futures``.
    """
    owner = os.getpid()
    threading._register_atexit(lambda: function() if os.getpid() == owner else None)  # type: ignore[attr-defined]
    if last:  # they are called in reverse order
        functions = threading._threading_atexits  # type: ignore[attr-defined]
        functions.insert(0, functions.pop())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class GradientHooks:
    """Hooks of a parameter that other tensors replace; the parameter itself is not kept."""

    def __init__(self, parameter: Tensor) -> None:
        self._hooks: Any = parameter._backward_hooks
        self._accumulated: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)

    def __bool__(self) -> bool:
        return bool(self._hooks or self._accumulated)

    def move(self, leaf: Tensor, *others: Tensor) -> None:
        """Share the parameter's hooks with ``leaf``, and those that are registered on any of the
        tensors later.
        """
        hooks = OrderedDict() if self._hooks is None and others else self._hooks
        if hooks is not None:
            for tensor in (leaf, *others):
                tensor._backward_hooks = hooks
        if self._accumulated:
            leaf._post_accumulate_grad_hooks = self._accumulated


@contextmanager
def unlogged_fake_tensors() -> Iterator[None]:
    """Around a run on fake tensors whose errors are handled: torch prints each with its traceback
    before it raises.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def avoid_fused_inference(model: nn.Module) -> None:
    """Make torch's encoder layers call their submodules in inference too, instead of one fused
    kernel.

    The kernel would use the weights of linear layers that hold shards without the collectives of
    their calls.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
