"""Process groups, their connections and stores, and the end of a process."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

HashStore = _distributed_c10d.HashStore
PrefixStore = _distributed_c10d.PrefixStore
Store = _distributed_c10d.Store
_FINISH_S = 10.0  # for gloo's threads to finish at the end of a job, on a busy machine
# A collective under way may wait for ranks that wait for the end of this process.
_FINISH_AFTER_ABORT_S = 0.2


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Sum ``input`` (1-D, n x m) over ``group`` and keep this rank's m elements in ``output``,
    possibly the same slice of ``input``.

    torch 2.13 names the collective ``reduce_scatter_single`` and deprecates the older name.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Concatenate every rank's ``input`` (m elements) into ``output`` (n x m). ``input`` may be
    this rank's slice of ``output``.

    torch 2.13 names the collective ``all_gather_single`` and deprecates the older name.
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


_COLLECTIVES = ("all", "_all", "broadcast", "reduce", "_reduce", "gather", "scatter", "barrier")
"""Beginnings of the names of a process group's collective methods."""


class _WatchedGroup(dist.ProcessGroup):
    """A process group in place of another, which passes the name of each collective to a function
    before the call.
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
    """Call ``called`` inside the block with the name of every collective that Python code begins on
    the default process group. An earlier reference to the group still works as before.
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


def default_store() -> Store:
    """Return a new connection to the default process group's store, usable while another thread
    waits on the store.
    """
    connection: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return connection


def held_store() -> Store:
    """Return the default process group's store itself: the serving process ends the service with
    the last reference.
    """
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def destroy_process_groups() -> None:
    """Destroy all process groups with their connections and threads, including groups still
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
    """Release the backends of ``groups``, so that gloo joins the backends' threads. Wait at most
    ``within_s`` seconds.
    """
    # Python has no call for the release: with gloo, ProcessGroup.shutdown() and abort() leave the
    # threads running (measured with torch 2.13). torch joins the threads when the last reference to
    # a group is gone, but users' globals, modules and meshes hold references. So the C++ method
    # that drops a group's backends, ProcessGroup::release_resources, is called by its mangled name
    # on the group's address, the result of _id(). If a build of torch lacks either, nothing is
    # done: the threads run on, and the process may abort at the end, after all results are written.
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    except OSError:  # another platform, or another layout of the package
        return
    drop_backends = getattr(library, "_ZN4c10d12ProcessGroup17release_resourcesEv", None)
    if drop_backends is None or not hasattr(dist.ProcessGroup, "_id"):
        return

    # The function's frame keeps the group, since the group's destructor would wait as well.
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
    """Break this rank's connections, so that waiting peers fail at once, if the backend supports a
    break.

    gloo's connections stay until the end of the main thread: gloo's destructor waits for
    collectives in flight, and so this process would wait for ranks that wait for the end of this
    process.
    """
    if not dist.is_initialized():
        return
    groups = list(dist.distributed_c10d._world.pg_map)
    at_end_of_main_thread(partial(_release_backends, groups, _FINISH_AFTER_ABORT_S), last=True)
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def flight_records() -> list[dict[str, Any]]:
    """Return the flight recorder's entries for this rank's last collectives, the oldest first.
    Empty without a recording.

    torch's flight recorder is on by default. ``TORCH_FR_BUFFER_SIZE`` (older:
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``) sets the number of entries. With gloo collectives are
    recorded, and the state of a collective stays "scheduled".
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
    """Call ``function`` in this process at the end of the main thread, before the functions of
    ``atexit``.

    The function may still change the exit code, and no exit function is skipped.

    Args:
        function: Function to call.
        last: Whether to call ``function`` after all other functions registered this way, including
            the functions of the pools of ``concurrent.futures``.
    """
    owner = os.getpid()
    threading._register_atexit(lambda: function() if os.getpid() == owner else None)  # type: ignore[attr-defined]
    if last:  # called in reverse order
        functions = threading._threading_atexits  # type: ignore[attr-defined]
        functions.insert(0, functions.pop())
