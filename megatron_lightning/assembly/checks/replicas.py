"""Checks that ranks hold the same tensors and read the same batch. The ranks compare fingerprints,
not data.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.stored_weight import plain_tensors
from megatron_lightning.pipeline.batch.microbatches import tensors_of

_FINGERPRINT_BYTES = 2 << 20
"""Bytes multiplied at a time, and half of the working memory. A multiple of 8."""


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 that depends on every bit of ``tensor`` and on the order of the bits."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return the :func:`fingerprint` of every tensor, on the first tensor's device.

    All tensors share one working memory. New memory for each tensor, freed between the results,
    leaves holes in the C library's heap: a rank once grew by half of its weights.
    """
    device = tensors[0].device if tensors else None
    results = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    work = _Work(max((_largest(tensor) for tensor in tensors), default=0), device)
    for index, tensor in enumerate(tensors):
        for part, plain_part in enumerate(plain_tensors(tensor.detach())):
            mark = work.fingerprint(plain_part) * (2 * part + 1)
            results[index] += mark.to(results.device)
    return results


def _largest(tensor: Tensor) -> int:
    return max(part.nbytes for part in plain_tensors(tensor.detach()))


class _Work:
    """Working memory of fingerprints."""

    def __init__(self, num_bytes: int, device: torch.device | None) -> None:
        size = -(-min(num_bytes, _FINGERPRINT_BYTES) // 8)
        self._products = torch.empty(size, dtype=torch.int64, device=device)
        # Odd factors keep every bit.
        self._factors = torch.arange(size, device=device) * 2 + 1

    def fingerprint(self, tensor: Tensor) -> Tensor:
        # By strides: a tensor of one entry may have any stride, and counts as contiguous.
        raw = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for start in range(0, raw.numel(), _FINGERPRINT_BYTES):
            some = raw[start : start + _FINGERPRINT_BYTES]
            words = self._products.to(raw.device)[: -(-some.numel() // 8)]
            words[-1:] = 0  # of an incomplete word
            words.view(torch.uint8)[: some.numel()] = some
            sums = words.sum() * (start // 8 * 2)
            total += words.mul_(self._factors.to(words)[: words.numel()]).sum() + sums
        return total


def diverged(marks: Tensor, group: AxisGroup) -> list[int]:
    """Return the indices of fingerprints that differ between the ranks of ``group``. A
    collective.
    """
    if group.process_group is None:
        return []
    low, high = marks.clone(), marks.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group.process_group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group.process_group)
    return [int(index) for index in (low != high).nonzero()]


def equalize(module: nn.Module, world: AxisGroup) -> None:
    """Broadcast the first rank's weights if any differ (unseeded initialization), as
    DistributedDataParallel does.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if world.size == 1 or not tensors or not diverged(fingerprints(tensors), world):
        return
    for tensor in tensors:
        for plain_part in plain_tensors(tensor.detach()):
            dist.broadcast(plain_part, src=world.ranks[0], group=world.process_group)


def check_replicas(
    parameters: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], context: ParallelContext
) -> None:
    """Check that parameters replicated over an axis are bit-equal over the axis. A collective.

    Raises:
        ShardingError: Naming the differing parameters and the axis.
    """
    names_by_axis: dict[str, list[str]] = {}
    for axis in ("dp-cp", "tp", "edp", "etp", "ep"):
        if context.axis(axis).process_group is not None:
            names_by_axis[axis] = [
                name
                for name in parameters
                if axis in (specs[name].data_axes, *specs[name].replica_axes)
            ]
    names = list(dict.fromkeys(chain.from_iterable(names_by_axis.values())))
    # Fingerprints instead of values: one number for each parameter crosses the network.
    marks = dict(zip(names, fingerprints([parameters[name] for name in names]), strict=True))
    for axis, equal_names in names_by_axis.items():
        if not equal_names:
            continue
        group = context.axis(axis)
        rows = diverged(torch.stack([marks[name] for name in equal_names]), group)
        differing = [equal_names[row] for row in rows]
        if differing:
            raise ShardingError(
                f"{len(differing)} parameter(s) differ between the {axis} ranks "
                f"{list(group.ranks)}, and their spec says they are replicated: "
                f"{', '.join(differing[:5])}. Initialize them from one seed, or declare how they "
                "are sharded."
            )


_TOLERANCE = 1e-3
"""Relative difference of trained copies over tp and pp: sums of gradients differ in the last
bits."""
_ROW = 8191


def check_trained_replicas(module: nn.Module, part: Part, context: ParallelContext) -> None:
    """Check that replicated parameters and saved buffers are still equal in training. A collective
    of every axis with several ranks.

    Copies are bit-equal over data-parallel ranks. Over tensor- and pipeline-parallel ranks random
    projections of two copies differ by at most 1e-3 of their norm.

    Raises:
        ShardingError: Naming tensors that differ or are missing on a rank, the axis and the usual
            causes.
    """
    if context.world_size == 1:
        return
    tensors = _replicated_tensors(module)
    # The gradient of these copies is one reduced buffer: not a bit may differ.
    for axis in ("dp-cp", "edp"):
        names = [n for n, t in tensors.items() if _spec_of(n, t, part).data_axes == axis]
        full_names = [n for n in names if not isinstance(tensors[n], DTensor)]
        agree_on_names(full_names, context.axis(axis), context.device)
        marks = [_exact(tensors[n]) for n in full_names]
        _refuse_drift(
            full_names, _spread(marks, context.axis(axis), context) > 0, context.axis(axis)
        )
    # Each of these copies computes the same gradient by itself, and kernels may round differently.
    for axis in ("tp", "etp", "ep", "pp"):
        close = [n for n, t in tensors.items() if _is_close_over(axis, n, t, part)]
        agree_on_names(close, context.axis(axis), context.device)
        sketches = [_sketch(tensors[n]) for n in close]
        spread = _spread([s[:-1] for s in sketches], context.axis(axis), context)
        norms = torch.stack([s[-1] for s in sketches]) if sketches else torch.zeros(0)
        _refuse_drift(close, spread > _TOLERANCE * norms.to(spread), context.axis(axis))


def agree_on_names(names: Sequence[str], group: AxisGroup, device: torch.device) -> None:
    """Check that ranks hold tensors of the same names. A rank with other names would wait forever.
    A collective.

    Raises:
        ShardingError: Naming the tensors not held by all ranks.
    """
    mark = torch.tensor([zlib.crc32("\n".join(names).encode())], device=device)
    if not diverged(mark, group):
        return
    names_of_ranks = group.all_gather_object(list(names))
    common = set(names_of_ranks[0]).intersection(*names_of_ranks)
    for rank, of_rank in zip(group.ranks, names_of_ranks, strict=True):
        if extra := [name for name in of_rank if name not in common]:
            raise ShardingError(
                f"rank {rank} holds {len(extra)} tensor(s) that other {group.name} ranks "
                f"{list(group.ranks)} do not have: {', '.join(extra[:5])}. Code that runs on one "
                "rank alone (rank_zero_only, if trainer.is_global_zero) made them. Make modules, "
                "copies, parameters and buffers on all ranks; for an average of the weights use "
                "EMAWeightAveraging."
            )
    raise ShardingError(
        f"{group.name} ranks {list(group.ranks)} hold their tensors in other orders: "
        f"{', '.join(names[:5])}. Make modules, parameters and buffers in one order on all ranks."
    )


def _replicated_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a rank's part by name."""
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    tensors = {**dict(module.named_parameters()), **buffers}
    plain_types = (Tensor, nn.Parameter, nn.Buffer, DTensor)
    return {
        n: t for n, t in tensors.items() if type(t) in plain_types and t.numel() and not t.is_meta
    }


def _spec_of(name: str, tensor: Tensor, part: Part) -> ShardSpec:
    more_axes = () if part.in_unit(name) else ("pp",)
    return part.specs.get(name) or ShardSpec.replicated(tensor.shape, partial_over=more_axes)


def _is_close_over(axis: str, name: str, tensor: Tensor, part: Part) -> bool:
    spec = _spec_of(name, tensor, part)
    if is_quantized(tensor.dtype) or name in part.tied or spec.tied_to is not None:
        return False
    return axis in spec.replica_axes or (axis == "pp" and "pp" in spec.partial_over)


def _exact(tensor: Tensor) -> Tensor:
    """Return the fingerprint as two float64, each of 32 bits."""
    mark = fingerprint(tensor)
    return torch.stack([(mark >> 32).double(), (mark & 0xFFFFFFFF).double()])


def _sketch(tensor: Tensor) -> Tensor:
    """Return two projections on random signs, the same on every rank, and the norm, in float64."""
    local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local_tensor.detach().reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).view(-1, _ROW)
    generator, values = torch.Generator().manual_seed(0), []
    for _ in range(2):
        signs, weights = (
            (torch.randint(0, 2, (size,), generator=generator, device="cpu") * 2 - 1).to(rows)
            for size in (_ROW, rows.shape[0])
        )
        values.append((rows @ signs).double() @ weights.double())
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.nan_to_num(torch.stack([*values, norm]))


def _spread(values: Sequence[Tensor], group: AxisGroup, context: ParallelContext) -> Tensor:
    """Return the largest difference of each row of values over the ranks of a group."""
    if group.process_group is None or not values:
        return torch.zeros(len(values), dtype=torch.float64)
    own_values = torch.stack([value.to(context.device) for value in values])
    ends = torch.stack([own_values, -own_values])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group.process_group)
    return ends.sum(0).amax(-1).cpu()


def _refuse_drift(names: Sequence[str], differs: Tensor, group: AxisGroup) -> None:
    differing = [name for name, bad in zip(names, differs.tolist(), strict=True) if bad]
    if differing:
        raise drift_error(differing, group)


def drift_error(names: Sequence[str], group: AxisGroup) -> ShardingError:
    """Return the error for replicated tensors that have diverged."""
    return ShardingError.drifted(names, group.name, group.ranks)


def check_same_batch(batch: object, context: ParallelContext) -> None:
    """Check that the ranks of a replica read the same batch. A collective of the replica.

    Raises:
        ShardingError: If the batches differ, so that stages and tensor ranks would work on
            different samples.
    """
    total = fingerprints(list(tensors_of(batch))).sum().to(context.device)
    for replica in (context.axis("tp-pp"), context.cp):
        if not diverged(total.view(1), replica):
            continue
        raise ShardingError(
            f"ranks {list(replica.ranks)} hold parts of one model replica and read different first "
            "batches. Call seed_everything before you draw data, since each process runs your "
            "script. Draw random transforms from torch's generators (seed_everything(..., "
            "workers=True) seeds those of workers), and give these ranks the same samples: a "
            "DistributedSampler or an iterable dataset of your own takes num_replicas and rank "
            "from trainer.distributed_sampler_kwargs."
        )
