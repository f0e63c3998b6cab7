"""The all-gather of parameters after a step of the sharded optimizer, inside that step or beside the next forward.

Overlapped, every bucket is gathered in the order in which forward reaches it, and a module waits for the buckets of its own
parameters when it is called. Modules that are entered without a call (the LightningModule, the pipelined module) are waited
for at the start of the step. Whoever else reads a weight between the step and the next forward calls :meth:`wait` first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_lightning.compat import all_gather
from megatron_lightning.optim.buckets import Bucket
from megatron_lightning.optim.reducer import GradientReducer


class ParameterGather:
    """Brings the parameters of sharded buckets up to date.

    Args:
        reducer: Whose buckets they are.
        module: The module whose forward the gathers overlap; None: they complete at once.
    """

    def __init__(self, reducer: GradientReducer, module: nn.Module | None = None) -> None:
        self._reducer, self._overlapped = reducer, module is not None
        self._unannounced: list[Bucket] = []
        self._hooks: list[Any] = []
        if module is not None:
            self._watch(module)

    def _watch(self, root: nn.Module) -> None:
        """Let every module wait for its parameters."""
        bucket_of = {id(p): bucket for bucket in self._reducer.buckets if bucket.sharded for p in bucket.parameters}
        for module in root.modules():
            own = {id(bucket_of[id(p)]): bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of}
            if module is root or hasattr(module, "pipeline_units"):
                self._unannounced += own.values()
            elif own:
                buckets = tuple(own.values())
                self._hooks.append(module.register_forward_pre_hook(lambda *_, buckets=buckets: self.wait(buckets)))

    def start(self, buckets: Iterable[Bucket]) -> None:
        """Gather the parameters of ``buckets``, in this order. A collective."""
        started, work = [], None
        for bucket in buckets:
            group = bucket.data.shard.process_group
            if bucket.value is None or group is None:
                continue
            self.wait([bucket])
            self._reducer.bytes_communicated["all_gather"] += bucket.value.nbytes
            if work is not None and bucket.value.device.type == "cpu":  # gloo is given one collective of a group at a time
                work.wait()
            work = bucket.gathering = all_gather(bucket.value, bucket.value[bucket.shard], group, async_op=True)
            started.append(bucket)
        if not self._overlapped:
            self.wait(started)

    def begin_step(self) -> None:
        """Wait for the parameters that are used without a call of their module."""
        self.wait(self._unannounced)

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait until the parameters of ``buckets``, or all of them, are up to date."""
        for bucket in self._reducer.buckets if buckets is None else buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def detach(self) -> None:
        """Let go of the modules; nothing is waited for, since the other ranks may have failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
