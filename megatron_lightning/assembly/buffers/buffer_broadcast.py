"""Broadcast of buffers, such as the running statistics of BatchNorm, from the first replica to the
other replicas.

Every data-parallel replica updates buffers from the replica's own samples. Outside of the pipelined
module only the last stage updates buffers of modules behind the call. As in
DistributedDataParallel, all ranks receive the first rank's buffers before the next step. Most
buffers never change (masks, position tables), so only two kinds are sent:

written    by a step on any rank: found without reading values (``buffer_watch``) and agreed once an
           optimizer step, in the all-reduce for unused parameters
diverged   by value, so that writes through ``.data`` are found, too: compared in every epoch
           between the steps 1 and 2, before steps 4, 8, 16, …, and before a checkpoint or an
           evaluation uses the buffers

Stages of a pipeline learn of written buffers with the outputs of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.buffers.buffer_watch import BufferPlaces
from megatron_lightning.assembly.buffers.shared_buffers import SharedBuffers
from megatron_lightning.assembly.checks.replicas import agree_on_names, drift_error, fingerprint
from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BufferSync:
    """Broadcast of the buffers of the first replica, and of the last stage, to the other ranks with
    the same buffers.

    Args:
        module: The module.
        part: The rank's part of the module.
        context: Groups of this rank.
    """

    def __init__(self, module: nn.Module, part: Part, context: ParallelContext) -> None:
        self._module = module
        self._part = part
        self._device = context.device
        self._is_last_stage = context.pp.rank == 0
        equal_buffers = {
            f"{path}.{key}".lstrip(".")
            for path, owner in module.named_modules()
            for key in getattr(owner, "equal_buffers", ())
        }
        self.replicas = SharedBuffers(context.dp_cp, context.device, equal_buffers)
        """Buffers shared by the data-parallel ranks. Agrees on the written buffers."""
        self._stages = SharedBuffers(
            context.pp, context.device, equal_buffers, self._refuse_averages
        )
        self._marks: dict[str, Tensor] = {}  # of buffers on all stages, at the last comparison
        self._find()
        self._remember()

    def _find(self) -> None:
        """Find the buffers, since hooks may add buffers. A collective."""
        # The last stage has the first replica's buffers before sending buffers to the other stages.
        self.replicas.places = BufferPlaces(
            self._module, lambda name: self._is_last_stage or self._part.in_unit(name)
        )
        self._stages.places = BufferPlaces(self._module, lambda name: not self._part.in_unit(name))
        for buffers_of_group in (self.replicas, self._stages):
            agree_on_names(
                list(buffers_of_group.places.current()), buffers_of_group.group, self._device
            )

    def synchronize(self, *, compare: bool = False) -> None:
        """Make buffers known to differ equal. A collective.

        Args:
            compare: Whether to look first for diverged buffers, by reading every buffer.
        """
        groups = (self.replicas, self._stages)
        if compare:
            for buffers in groups:
                buffers.read_pending()
            self._find()
        for buffers in groups:
            buffers.synchronize(compare=compare)
        if compare:
            self._remember()

    def _remember(self) -> None:
        """Record fingerprints of the buffers on all stages."""
        if self._stages.group.process_group is not None:
            self._marks = {
                name: fingerprint(buffer).to(self._device)
                for name, buffer in self._stages.places.current().items()
                if buffer is not None and not name.endswith(_STATISTICS)
            }

    def _refuse_averages(self, found: Mapping[str, Tensor]) -> None:
        """Refuse buffers that stages other than the last have written with values of their own.

        On stages other than the last a step does not reach the code behind the units, so only hooks
        can have written.

        Args:
            found: Fingerprints of the buffers with different values on different stages, by name.
        """
        names, group = [name for name in found if name in self._marks], self._stages.group
        if not names:
            return
        changes = torch.stack([found[name] != self._marks[name] for name in names])
        changes = (changes & (not self._is_last_stage)).int()
        dist.all_reduce(changes, dist.ReduceOp.MAX, group=group.process_group)
        differing = [n for n, bad in zip(names, changes.tolist(), strict=True) if bad]
        if differing:
            raise drift_error(differing, group)

    def forget_writes(self) -> None:
        """Do not count writes since the last look."""
        for buffers_of_group in (self.replicas, self._stages):
            buffers_of_group.forget_writes()

    def begin_batch(self, batch: int, *, only_new: bool = False) -> None:
        """Make the buffers equal before a training batch. A collective.

        Args:
            batch: Number of the batch in the epoch, from 1.
            only_new: Whether the previous batch has sent known buffers at the end, and the first
                batch of the epoch has compared buffers.
        """
        if batch > (2 if only_new else 1) and batch & (batch - 1) == 0:
            self.synchronize(compare=True)
            return
        for buffers_of_group in (self.replicas, self._stages):
            if buffers_of_group.begin_batch() or not only_new:
                buffers_of_group.synchronize()

    def begun(self) -> tuple[str, ...]:
        """Return the buffers outside of pipeline units newly written by the last stage.

        Raises:
            ConfigError: If such a buffer is saved, and belongs to a module between the units: all
                stages but one have no values there.
        """
        begun = self._stages.begun() if self._is_last_stage else ()
        paths = [name for name in begun if self._is_between_units(name)]
        if paths:
            raise ConfigError(
                f"the buffer {paths[0]} is written by a module that is no unit of the pipeline, "
                "so that every stage runs it and only one has its input. Name the units with this "
                "module among them, in the order of the calls: PipelineOptions(units=[...]), or "
                "set pipeline_model_parallel_size to 1."
            )
        return begun

    def _is_between_units(self, name: str) -> bool:
        path, (owner, _, key) = self._part.path, name.rpartition(".")
        if path is None or owner == path or not f"{owner}.".startswith(f"{path}." if path else ""):
            return False
        return key not in self._module.get_submodule(owner)._non_persistent_buffers_set

    def follow(self, begun: Iterable[str]) -> None:
        """Send the buffers returned by :meth:`begun` on the last stage."""
        self._stages.add(begun, compare=True)
