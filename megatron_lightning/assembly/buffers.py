"""Broadcast of buffers, such as the running statistics of BatchNorm, from the first replica to the
others.

Every data-parallel replica updates its buffers from its own samples, and outside of the pipelined
module only the last stage updates what comes after the call. As in DistributedDataParallel, all
ranks get the first rank's buffers before the next step. Most buffers never diverge (masks, position
tables), so only those that did are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.replicas import diverged, drift_error, fingerprint
from megatron_lightning.parallel.context import AxisGroup, ParallelContext

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BufferSync:
    """Broadcast of the buffers of the first replica, and of the last stage, to the other ranks that
    hold them.
    """

    def __init__(self, module: nn.Module, part: Part, context: ParallelContext) -> None:
        self._module = module
        self._part = part
        self._context = context
        self._diverged: dict[str, list[str]] = {}
        self._shared: dict[str, Tensor] = {}  # marks of what all stages hold, when it was shared
        self._remember()

    def synchronize(self, *, compare: bool) -> None:
        """Make the buffers equal that are known to diverge; a collective.

        Args:
            compare: Whether to look first for those that have diverged, which reads every buffer:
                after the first step, and before a checkpoint or evaluation uses them.
        """
        for axis, group, buffers in self._replicated():
            if compare:
                marks = torch.stack(
                    [fingerprint(buffer).to(self._context.device) for buffer in buffers.values()]
                )
                names = list(buffers)
                found = {names[index] for index in diverged(marks, group)} | set(
                    self._diverged.get(axis, [])
                )
                self._diverged[axis] = [name for name in names if name in found]
                if axis == "pp" and found:
                    self._refuse_averages(dict(zip(names, marks, strict=True)), found, group)
            self._broadcast(buffers, axis, group)
        if compare:
            self._remember()

    def _remember(self) -> None:
        """Mark the buffers that all stages hold as they are now."""
        self._shared = {
            name: fingerprint(buffer).to(self._context.device)
            for axis, _, buffers in self._replicated()
            for name, buffer in buffers.items()
            if axis == "pp" and not name.endswith(_STATISTICS)
        }

    def _refuse_averages(
        self, marks: dict[str, Tensor], found: Collection[str], group: AxisGroup
    ) -> None:
        """Refuse buffers that stages other than the last have written, with other values than it.

        A step does not reach the code behind the units there, so that only hooks can have written.
        """
        names = [name for name in marks if name in found and name in self._shared]
        if not names:
            return
        written = torch.stack([marks[name] != self._shared[name] for name in names])
        written = (written & (group.rank > 0)).int()  # the last stage is on the first rank
        dist.all_reduce(written, dist.ReduceOp.MAX, group=group.process_group)
        differing = [n for n, bad in zip(names, written.tolist(), strict=True) if bad]
        if differing:
            raise drift_error(differing, group)

    def _replicated(self) -> Iterator[tuple[str, AxisGroup, dict[str, Tensor]]]:
        """Yield (axis, ranks, buffers) of the buffers that several ranks hold."""
        buffers = dict(self._module.named_buffers())
        outside = {name: buffer for name, buffer in buffers.items() if not self._part.in_unit(name)}
        for axis, group, held in (
            ("pp", self._context.pp, outside),
            ("dp-cp", self._context.dp_cp, buffers),
        ):
            if group.process_group is not None and held:
                yield axis, group, held

    def _broadcast(self, buffers: dict[str, Tensor], axis: str, group: AxisGroup) -> None:
        diverged = [
            buffers[name].detach() for name in self._diverged.get(axis, []) if name in buffers
        ]
        for dtype in sorted({buffer.dtype for buffer in diverged}, key=str):
            alike = [buffer for buffer in diverged if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1).to(self._context.device) for buffer in alike])
            dist.broadcast(flat, src=group.ranks[0], group=group.process_group)
            for buffer, values in zip(
                alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True
            ):
                buffer.copy_(values.view_as(buffer))
