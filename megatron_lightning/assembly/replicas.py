"""Checks that ranks hold the same tensors and read the same batch; they compare fingerprints, not
data.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.spec import ShardSpec
from megatron_lightning.pipeline.microbatches import tensors_of


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 that depends on every bit of ``tensor`` and on their order."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    # Odd factors keep every bit.
    return (padded * (2 * torch.arange(padded.numel(), device=padded.device) + 1)).sum()


def diverged(fingerprints: Tensor, group: AxisGroup) -> list[int]:
    """Return the indices at which the fingerprints differ between the ranks of ``group``; a
    collective.
    """
    if group.process_group is None:
        return []
    low, high = fingerprints.clone(), fingerprints.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group.process_group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group.process_group)
    return [int(index) for index in (low != high).nonzero()]


def equalize(module: nn.Module, world: AxisGroup) -> None:
    """Broadcast the first rank's weights if any differ (unseeded initialization), as
    DistributedDataParallel does.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if (
        world.size == 1
        or not tensors
        or not diverged(torch.stack([fingerprint(t) for t in tensors]), world)
    ):
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=world.ranks[0], group=world.process_group)


def check_replicas(
    parameters: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], context: ParallelContext
) -> None:
    """Check that parameters that are not sharded over an axis are bit-equal over it; a collective.

    Raises:
        ShardingError: Naming the parameters that differ and the axis.
    """
    names = list(parameters)
    if context.world_size == 1 or not names:
        return
    fingerprints = torch.stack([fingerprint(parameters[name]) for name in names])
    for axis in ("dp-cp", "tp", "edp", "etp", "ep"):
        group = context.axis(axis)
        equal = [
            i
            for i, name in enumerate(names)
            if axis in (specs[name].data_axes, *specs[name].replica_axes)
        ]
        differing = [names[equal[i]] for i in diverged(fingerprints[equal], group)] if equal else []
        if differing:
            raise ShardingError(
                f"{len(differing)} parameter(s) differ between the {axis} ranks "
                f"{list(group.ranks)}, and their spec says they are replicated: "
                f"{', '.join(differing[:5])}. Initialize them from one seed, or declare how they "
                "are sharded."
            )


def check_same_batch(batch: object, context: ParallelContext) -> None:
    """Check that the ranks of a replica read the same batch; a collective of the replica.

    Raises:
        ShardingError: If they do not, so that stages and tensor ranks would work on different
            samples.
    """
    fingerprints = [fingerprint(tensor).to(context.device) for tensor in tensors_of(batch)]
    total = torch.stack(
        fingerprints or [torch.zeros((), dtype=torch.int64, device=context.device)]
    ).sum()
    for replica in (context.axis("tp-pp"), context.cp):
        if not diverged(total.view(1), replica):
            continue
        raise ShardingError(
            f"ranks {list(replica.ranks)} hold parts of one model replica and read different first "
            "batches. Draw random transforms from torch's generators (seed_everything(..., "
            "workers=True) seeds those of workers), and give these ranks the same samples: a "
            "DistributedSampler or an iterable dataset of your own takes num_replicas and rank "
            "from trainer.distributed_sampler_kwargs."
        )
