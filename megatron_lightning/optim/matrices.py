"""Optimizers of full matrices (Muon, https://kellerjordan.github.io/posts/muon): one rank owns each
matrix.

The buckets assign each parameter to one data-parallel rank (``buckets.assigned_layout``), except
those that FSDP2 shards. Of these, and of tensor-parallel shards, every matrix has an owner among
the ranks that hold shards of it: the owner gathers the shards of the gradient before a step and
scatters the result after it, all of a step's matrices in one all-to-all. Fused weights are stepped
as the matrices they consist of (query, key and value; gate and up), so that the update does not
depend on how they are stored or sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.buckets import ParameterShard
from megatron_lightning.optim.chained import members
from megatron_lightning.optim.entries import OptimizerEntry, Target
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.spec import Shard, ShardSpec

_MATRIX_OPTIMIZERS = (Muon,)


def steps_matrices(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` treats every parameter as one matrix."""
    return isinstance(optimizer, _MATRIX_OPTIMIZERS)


def matrix_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of ``optimizer`` whose parameters are stepped as matrices."""
    return [
        group
        for member in members(optimizer)
        if steps_matrices(member)
        for group in member.param_groups
    ]


def names_of_matrices(
    optimizers: Iterable[Any], names: Mapping[str, nn.Parameter]
) -> frozenset[str]:
    """Return the names of the parameters that one of ``optimizers`` steps as matrices."""
    groups = [
        group
        for optimizer in optimizers
        if isinstance(optimizer, Optimizer)
        for group in matrix_groups(optimizer)
    ]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(name for name, parameter in names.items() if id(parameter) in stepped)


class MatrixExchange:
    """Gather full matrices on their owners, and scatter the stepped ones.

    Construction sets the targets of the entries; like the other methods it is a collective of
    ``group``.

    Args:
        held: Parameters, the same ones on all ranks of the group, and this rank's spec of each,
            which may be empty.
        group: The ranks that share them; a group of one for parameters that only have to be split.
        device: Where the matrices are stepped; None: where the parameters are.
    """

    def __init__(
        self,
        held: Sequence[tuple[OptimizerEntry, ShardSpec]],
        group: AxisGroup,
        device: torch.device | None = None,
    ) -> None:
        entries, own = [entry for entry, _ in held], [spec for _, spec in held]
        self._entries = entries
        self._group = group
        self._nothing = next(
            (entry.shard.value for entry in entries if entry.shard), torch.empty(0)
        ).new_empty(0)
        self._specs = group.all_gather_object(own)
        self._owner = _assign_owners(
            [_numel(spec) for spec in own],
            [self._holders(index) for index in range(len(own))],
            group.size,
        )
        full = self._gather(self._values())
        for index, entry in enumerate(entries):
            entry.exchanged, entry.targets = True, []
            for number, matrix in enumerate(
                _split(full[index], entry.spec) if index in full else ()
            ):
                target = nn.Parameter(
                    matrix.to(device or matrix.device, torch.float32, copy=True).contiguous()
                )
                entry.targets.append(
                    Target(target, partial(_place, spec=entry.spec, number=number))
                )

    def gather_gradients(self) -> None:
        """Set the gradient of every matrix; unused parameters have none."""
        own = [None if entry.shard is None else entry.shard.target.grad for entry in self._entries]
        values = zip(own, self._values(), strict=True)
        gradients = [
            torch.zeros_like(value) if gradient is None else gradient for gradient, value in values
        ]
        for index, matrix in self._gather(gradients).items():
            entry = self._entries[index]
            for target, part in zip(entry.targets, _split(matrix, entry.spec), strict=True):
                target.tensor.grad = part.to(target.tensor) if own[index] is not None else None

    def scatter_results(self) -> None:
        """Copy the stepped matrices into the parameters of all ranks, and drop the gradients."""
        full = {}
        for index, entry in enumerate(self._entries):
            if entry.targets and entry.shard is not None:
                full[index] = _join(
                    [target.tensor.detach() for target in entry.targets], entry.spec
                ).to(entry.shard.value)
                for target in entry.targets:
                    target.tensor.grad = None
        for value, shard in zip(self._values(), self._scatter(full), strict=True):
            value.copy_(shard.view_as(value))

    def refresh(self, keep: Set[str]) -> None:
        """Copy the parameters into the owners' matrices, except those with a global name in
        ``keep``.
        """
        for index, matrix in self._gather(self._values()).items():
            entry = self._entries[index]
            if entry.global_name not in keep:
                for target, part in zip(entry.targets, _split(matrix, entry.spec), strict=True):
                    target.tensor.data.copy_(part)

    def _values(self) -> list[Tensor]:
        return [
            self._nothing if entry.shard is None else entry.shard.value for entry in self._entries
        ]

    def _holders(self, index: int) -> list[int]:
        """Return the ranks that hold a shard of a matrix; the others do not know its gradient."""
        return [rank for rank in range(self._group.size) if _local_numel(self._specs[rank][index])]

    def _owned_by(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self._owner) if owner == rank]

    def _gather(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send every shard to its owner; return this rank's full matrices by index."""
        ranks, mine = range(self._group.size), self._owned_by(self._group.rank)
        sizes = [sum(_local_numel(self._specs[rank][index]) for index in mine) for rank in ranks]
        received = self._all_to_all(
            [[shards[index] for index in self._owned_by(rank)] for rank in ranks], sizes, shards
        )
        full = {
            index: shards[index].new_empty(self._entries[index].spec.global_shape) for index in mine
        }
        for rank in ranks:
            for index, shard in zip(mine, self._shards_of(received[rank], rank, mine), strict=True):
                for part in self._specs[rank][index].shards(shard):
                    full[index][part.box.slices] = part.data
        return full

    def _scatter(self, full: Mapping[int, Tensor]) -> list[Tensor]:
        """Send every rank its shards of the owners' matrices; return this rank's, in order."""
        ranks, own = (
            range(self._group.size),
            self._specs[self._group.rank if self._group.size > 1 else 0],
        )
        sent = [
            [self._specs[rank][index].shard(matrix) for index, matrix in full.items()]
            for rank in ranks
        ]
        sizes = [sum(_local_numel(own[index]) for index in self._owned_by(rank)) for rank in ranks]
        received = self._all_to_all(sent, sizes, self._values())
        shards: dict[int, Tensor] = {}
        for rank in ranks:
            owned = self._owned_by(rank)
            shards.update(
                zip(owned, self._shards_of(received[rank], self._group.rank, owned), strict=True)
            )
        return [shards[index] for index in range(len(self._entries))]

    def _shards_of(self, flat: Tensor, rank: int, indices: Sequence[int]) -> list[Tensor]:
        """Split the concatenated shards that ``rank`` holds of some matrices."""
        specs = [self._specs[rank][index] for index in indices]
        parts = flat.split_with_sizes([_local_numel(spec) for spec in specs])
        return [part.view(spec.local_shape) for part, spec in zip(parts, specs, strict=True)]

    def _all_to_all(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send a list of tensors to every rank; return those received from each, flat."""
        flat = [
            torch.cat([t.reshape(-1) for t in tensors]) if tensors else like[0].new_empty(0)
            for tensors in sent
        ]
        if self._group.process_group is None:
            return flat
        received = like[0].new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            torch.cat(flat),
            list(sizes),
            [tensor.numel() for tensor in flat],
            group=self._group.process_group,
        )
        return list(received.split_with_sizes(list(sizes)))


def is_split(spec: ShardSpec, context: ParallelContext) -> bool:
    """Return whether tensor-parallel ranks hold different shards of a parameter."""
    return "tp" in spec.sharded_over and context.tp.size > 1


def require_undivided(
    entry: OptimizerEntry, shard: ParameterShard, context: ParallelContext
) -> None:
    """Check that no other axis than tensor parallelism divides a matrix."""
    axes = [
        axis for axis in entry.spec.sharded_over if axis != "tp" and context.axis(axis).size > 1
    ]
    if axes or tuple(shard.value.shape) != entry.spec.local_shape:
        raise ConfigError(
            f"{entry.name} is sharded over {', '.join(axes) or 'flat ranges'}, and an optimizer of "
            "full matrices cannot step a part. Step it with an element-wise optimizer alongside: "
            "ChainedOptimizer(Muon(...), AdamW(...))."
        )


def _assign_owners(
    weights: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int
) -> list[int]:
    """Return the owner of each matrix: the largest first, each to the one of its holders with the
    least.
    """
    load, owner = [0] * num_ranks, [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        owner[index] = min(holders[index], key=lambda rank: load[rank])
        load[owner[index]] += weights[index]
    return owner


def _numel(spec: ShardSpec) -> int:
    return torch.Size(spec.global_shape).numel()


def _local_numel(spec: ShardSpec) -> int:
    return torch.Size(spec.local_shape).numel()


def _split(full: Tensor, spec: ShardSpec) -> list[Tensor]:
    """Return the logical matrices of a full weight, each with its rows in order."""
    if not spec.fused_rows:
        return [full]
    periods = full.view(-1, sum(spec.fused_rows), *full.shape[1:])
    return [
        part.reshape(-1, *full.shape[1:])
        for part in periods.split_with_sizes(list(spec.fused_rows), dim=1)
    ]


def _join(matrices: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """Undo :func:`_split`."""
    if not spec.fused_rows:
        return matrices[0]
    num_periods = spec.global_shape[0] // sum(spec.fused_rows)
    parts = [matrix.view(num_periods, -1, *matrix.shape[1:]) for matrix in matrices]
    return torch.cat(parts, dim=1).view(spec.global_shape)


def _place(matrix: Tensor, *, spec: ShardSpec, number: int) -> list[Shard]:
    """Return the rows of the logical matrix ``number`` as shards of the full weight."""
    zeros = (0,) * (matrix.dim() - 1)
    if not spec.fused_rows:
        return [Shard((0, *zeros), matrix)]
    period, rows = sum(spec.fused_rows), spec.fused_rows[number]
    first = [0, *accumulate(spec.fused_rows)][number]
    return [
        Shard((index * period + first, *zeros), part)
        for index, part in enumerate(matrix.split_with_sizes([rows] * (matrix.shape[0] // rows)))
    ]
