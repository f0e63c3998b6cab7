"""Buffers, such as the running statistics of BatchNorm, on ranks that hold the same ones: the first replica's count.

Every data-parallel replica updates its buffers from its own samples, and of those outside of the pipelined module the last
stage alone updates what comes after the call. As in DistributedDataParallel the first rank's are everybody's before the next
step. Most buffers never part (masks, tables of positions), so only those are sent that were seen to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn

from megatron_lightning.assembly.assemble import Assembly, disagreeing, fingerprint
from megatron_lightning.parallel.context import AxisGroup, ParallelContext


class BufferSync:
    """Gives the buffers of the first replica, and of the last stage, to the other ranks that hold them.

    Args:
        module: The LightningModule.
        assembly: What this rank holds of it.
        context: Groups of this rank.
    """

    def __init__(self, module: nn.Module, assembly: Assembly, context: ParallelContext) -> None:
        self._module, self._assembly, self._context = module, assembly, context
        self._parted: dict[str, list[str]] = {}

    def compare(self) -> None:
        """Look which buffers have parted, and make them equal; a collective, which reads every buffer."""
        for axis, group, buffers in self._shared():
            marks = torch.stack([fingerprint(buffer).to(self._context.device) for buffer in buffers.values()])
            names = list(buffers)
            found = {names[index] for index in disagreeing(marks, group)}
            self._parted[axis] = [name for name in names if name in found or name in self._parted.get(axis, [])]
            self._send(buffers, axis, group)

    def share(self) -> None:
        """Make those equal that :meth:`compare` has seen to part; a collective."""
        for axis, group, buffers in self._shared():
            self._send(buffers, axis, group)

    def _shared(self) -> Iterator[tuple[str, AxisGroup, dict[str, Tensor]]]:
        """Yield (axis, ranks, buffers) of what several ranks hold."""
        buffers = dict(self._module.named_buffers())
        outside = {name: buffer for name, buffer in buffers.items() if not self._assembly.in_unit(name)}
        for axis, group, held in (("pp", self._context.pp, outside), ("dp-cp", self._context.dp_cp, buffers)):
            if group.process_group is not None and held:
                yield axis, group, held

    def _send(self, buffers: dict[str, Tensor], axis: str, group: AxisGroup) -> None:
        parted = [buffers[name].detach() for name in self._parted.get(axis, []) if name in buffers]
        for dtype in sorted({buffer.dtype for buffer in parted}, key=str):
            alike = [buffer for buffer in parted if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1).to(self._context.device) for buffer in alike])
            dist.broadcast(flat, src=group.ranks[0], group=group.process_group)
            for buffer, part in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
                buffer.copy_(part.view_as(buffer))


def synchronise_layers(module: nn.Module, layer_sync: LayerSync, replicas: AxisGroup) -> None:
    """Let BatchNorm layers see the samples of all data-parallel replicas, in place (``Trainer(sync_batchnorm=True)``).

    Lightning's own plugin would take the whole world for replicas.
    """
    if replicas.size > 1:
        if type(layer_sync) is TorchSyncBatchNorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module, replicas.process_group)  # type: ignore[no-untyped-call]
        else:
            layer_sync.apply(module)
