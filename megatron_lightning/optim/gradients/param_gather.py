"""The all-gather of parameters after a step of the sharded optimizer, inside the step or overlapped
with the next forward.

If overlapped, buckets are gathered in the order of the forward, and the forward of a module waits
for the buckets of the module's direct parameters. Parameters may also be read without a call of the
owner: ``nn.MultiheadAttention`` reads the weight of ``out_proj``. So the first training step waits
for gathers at once and records the called modules. For parameters of a module without calls, the
innermost called module around waits. Without a called module around, the start of the step waits
(the LightningModule and the pipelined module are entered without a call). Other readers of weights
between the step and the next forward call :meth:`ParameterGather.wait` first. Autograd refuses a
backward through a weight read too early.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.parameter_storage import StoredBucket
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.parallel.cpu_exchange import gather_chunks


@dataclass(eq=False)
class _Reader:
    """A module with a forward that waits for parameter gathers."""

    buckets: list[Bucket]
    """Buckets of these parameters."""
    called: bool = False
    """Whether a training forward has called the module."""
    hook: Any = None


class ParameterGather:
    """Gather the parameters of sharded buckets.

    Args:
        reducer: Owner of the buckets.
        module: The module with the overlapped forward. None: gathers complete at once.
    """

    def __init__(self, reducer: GradientReducer, module: nn.Module | None = None) -> None:
        self._reducer = reducer
        self._unannounced: list[Bucket] = []
        self._readers: dict[str, _Reader] = {}  # by path. A shared module has several paths
        self._learning = self._overlapped = False
        if module is not None:
            self._watch(module)

    def _watch(self, root: nn.Module) -> None:
        """Make every module wait for direct parameters, and record the module's calls."""
        bucket_of = {
            id(p): bucket
            for bucket in self._reducer.buckets
            if bucket.sharded
            for p in bucket.parameters
        }
        readers: dict[int, _Reader] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            if id(module) not in readers:
                buckets = {
                    id(bucket_of[id(p)]): bucket_of[id(p)]
                    for p in module.parameters(recurse=False)
                    if id(p) in bucket_of
                }
                readers[id(module)] = reader = _Reader(list(buckets.values()))
                if module is root or hasattr(module, "pipeline_units"):
                    self._unannounced += reader.buckets
                # Before existing hooks: weight norm's computes the weight from parameters.
                reader.hook = module.register_forward_pre_hook(
                    lambda *_, reader=reader: self._announce(reader), prepend=True
                )
            self._readers[path] = readers[id(module)]

    def _announce(self, reader: _Reader) -> None:
        if self._learning and torch.is_grad_enabled():
            reader.called = True
        self.wait(reader.buckets)

    def _learn(self) -> None:
        """Assign the waits for parameters of modules without calls to called modules. From then on
        gathers overlap.
        """
        for path, reader in self._readers.items():
            if reader.called:
                continue
            outer = path
            while outer and not self._readers[outer].called:
                outer = outer.rpartition(".")[0]
            waits = (
                self._readers[outer].buckets if self._readers[outer].called else self._unannounced
            )
            waits += [bucket for bucket in reader.buckets if bucket not in waits]
        for reader in self._readers.values():
            if not reader.buckets:
                reader.hook.remove()
        self._learning = False
        self._overlapped = True

    def start(self, buckets: Iterable[Bucket]) -> None:
        """Gather the parameters of ``buckets``, in this order. A collective."""
        started = []
        for bucket in buckets:
            group = bucket.data.shard.process_group
            if bucket.stored is None or group is None:
                continue
            self.wait([bucket])
            bucket.stored.encode(self._reducer.all_reduce)
            self._reducer.bytes_communicated["all_gather"] += bucket.stored.value.nbytes
            bucket.gathering = gather_chunks(bucket.stored.value, group)
            started.append(bucket)
        if not self._overlapped:
            self.wait(started)

    def begin_step(self) -> None:
        """Wait for parameters read without a module call."""
        if self._learning and any(reader.called for reader in self._readers.values()):
            self._learn()
        self._learning = bool(self._readers) and not self._overlapped
        self.wait(self._unannounced)

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait until the parameters of ``buckets`` (None: all) are up to date."""
        for bucket in self._reducer.buckets if buckets is None else buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None
                # Autograd refuses a backward with the old value.
                increment_version(bucket.parameters)
                bucket.record_gathered()

    def store(self) -> None:
        """Store the parameters by the buckets' storages from now on. A collective."""
        for stored in self._stored():
            # Raises if hooks have written quantized data since the setup.
            stored.were_written()
            stored.store()
        self.start(
            bucket
            for bucket in self._reducer.buckets
            if bucket.stored is not None and bucket.stored.is_quantized
        )

    def restore_values(self) -> None:
        """Store all parameters as values, until the next call of :meth:`store`. A collective."""
        self.wait()
        for stored in self._stored():
            stored.restore_values()

    def _stored(self) -> list[StoredBucket]:
        return [b.stored for b in self._reducer.buckets if b.stored is not None]

    def detach(self) -> None:
        """Remove the hooks without waiting, since other ranks may have failed."""
        for reader in self._readers.values():
            reader.hook.remove()
        self._readers.clear()
