"""Optimizers that need whole matrices (Muon, https://kellerjordan.github.io/posts/muon): one rank owns each matrix.

Over the data-parallel ranks the buckets assign whole parameters (``buckets.whole_layout``), but for those that FSDP2 shards.
Of these, and of what tensor-parallel ranks share, every matrix has an owner among the ranks that have parts of it: before a
step the owner collects the shards of the gradient, after it the shards of the result go back, all of a step's matrices in one
all-to-all. Fused weights are stepped as the matrices they consist of (query, key and value; gate and up), so that the update
does not depend on how they are stored or sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.chained import members
from megatron_lightning.optim.entries import Entry, Part, Pieces
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import ShardSpec

_MATRIX_OPTIMIZERS = (Muon,)


def steps_matrices(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` treats every parameter as one matrix."""
    return isinstance(optimizer, _MATRIX_OPTIMIZERS)


def matrix_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of ``optimizer`` whose parameters are stepped as matrices."""
    return [group for member in members(optimizer) if steps_matrices(member) for group in member.param_groups]


def names_of_matrices(optimizers: Iterable[Any], names: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Return the names of the parameters that one of ``optimizers`` steps as matrices."""
    groups = [group for optimizer in optimizers if isinstance(optimizer, Optimizer) for group in matrix_groups(optimizer)]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(name for name, parameter in names.items() if id(parameter) in stepped)


class MatrixExchange:
    """Gives the owners whole matrices to step, and everyone the shards of the result.

    Construction fills in the parts of ``entries``; like the other methods it is a collective of ``group``.

    Args:
        held: Parameters, the same ones on all ranks of the group, and the part of each that this rank has, which may be empty.
        group: The ranks that share them; a group of one for parameters that only have to be split.
        device: Where the matrices are stepped; None: where the parameters are.
    """

    def __init__(self, held: Sequence[tuple[Entry, ShardSpec]], group: AxisGroup, device: torch.device | None = None) -> None:
        entries, own = [entry for entry, _ in held], [spec for _, spec in held]
        self._entries, self._group = entries, group
        self._nothing = next((entry.value for entry in entries if entry.value is not None), torch.empty(0)).new_empty(0)
        self._specs = group.all_gather_object(own)
        self._owner = _deal([_numel(spec) for spec in own], [self._holders(index) for index in range(len(own))], group.size)
        whole = self._collect(self._values())
        for index, entry in enumerate(entries):
            entry.exchanged, entry.start, entry.parts = True, 0, []
            for number, matrix in enumerate(_split(whole[index], entry.spec) if index in whole else ()):
                target = nn.Parameter(matrix.to(device or matrix.device, torch.float32, copy=True).contiguous())
                entry.parts.append(Part(target, partial(_place, spec=entry.spec, number=number)))

    def collect_gradients(self) -> None:
        """Give every part its gradient; parameters that nobody used have none."""
        present = [entry.carrier is not None and entry.carrier.grad is not None for entry in self._entries]
        gradients = [
            entry.carrier.grad if entry.carrier is not None and entry.carrier.grad is not None else torch.zeros_like(value)
            for entry, value in zip(self._entries, self._values(), strict=True)
        ]
        for index, matrix in self._collect(gradients).items():
            entry = self._entries[index]
            for part, piece in zip(entry.parts, _split(matrix, entry.spec), strict=True):
                part.target.grad = piece.to(part.target) if present[index] else None

    def distribute(self) -> None:
        """Copy what the owners stepped into the parameters of all ranks, and drop the gradients."""
        whole = {}
        for index, entry in enumerate(self._entries):
            if entry.parts and entry.value is not None:
                whole[index] = _join([part.target.detach() for part in entry.parts], entry.spec).to(entry.value)
                for part in entry.parts:
                    part.target.grad = None
        for value, shard in zip(self._values(), self._spread(whole), strict=True):
            value.copy_(shard.view_as(value))

    def refresh(self, keep: Iterable[str]) -> None:
        """Make the owners' matrices anew from the parameters, but for those with a global name in ``keep``."""
        kept = set(keep)
        for index, matrix in self._collect(self._values()).items():
            entry = self._entries[index]
            if entry.global_name not in kept:
                for part, piece in zip(entry.parts, _split(matrix, entry.spec), strict=True):
                    part.target.data.copy_(piece)

    def _values(self) -> list[Tensor]:
        return [self._nothing if entry.value is None else entry.value for entry in self._entries]

    def _holders(self, index: int) -> list[int]:
        """Return the ranks that have a part of a matrix; what has none knows nothing of its gradient."""
        return [rank for rank in range(self._group.size) if _local_numel(self._specs[rank][index])]

    def _owned_by(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self._owner) if owner == rank]

    def _collect(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send every shard to its owner; return this rank's matrices, whole, by index."""
        ranks, mine = range(self._group.size), self._owned_by(self._group.rank)
        sizes = [sum(_local_numel(self._specs[rank][index]) for index in mine) for rank in ranks]
        received = self._all_to_all([[shards[index] for index in self._owned_by(rank)] for rank in ranks], sizes, shards)
        whole = {index: shards[index].new_empty(self._entries[index].spec.global_shape) for index in mine}
        for rank in ranks:
            for index, shard in zip(mine, self._cut(received[rank], rank, mine), strict=True):
                for offset, box in self._specs[rank][index].pieces(shard):
                    whole[index][tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))] = box
        return whole

    def _spread(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """Send every rank its shards of the owners' matrices; return this rank's, in order."""
        ranks, own = range(self._group.size), self._specs[self._group.rank if self._group.size > 1 else 0]
        sent = [[self._specs[rank][index].shard(matrix) for index, matrix in whole.items()] for rank in ranks]
        sizes = [sum(_local_numel(own[index]) for index in self._owned_by(rank)) for rank in ranks]
        received = self._all_to_all(sent, sizes, self._values())
        shards: dict[int, Tensor] = {}
        for rank in ranks:
            owned = self._owned_by(rank)
            shards.update(zip(owned, self._cut(received[rank], self._group.rank, owned), strict=True))
        return [shards[index] for index in range(len(self._entries))]

    def _cut(self, flat: Tensor, rank: int, indices: Sequence[int]) -> list[Tensor]:
        """Cut what ``rank`` holds of some matrices, one after another, into its shards."""
        specs = [self._specs[rank][index] for index in indices]
        parts = flat.split_with_sizes([_local_numel(spec) for spec in specs])
        return [part.view(spec.local_shape) for part, spec in zip(parts, specs, strict=True)]

    def _all_to_all(self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Send a list of tensors to every rank; return what came from each, flat."""
        flat = [torch.cat([t.reshape(-1) for t in tensors]) if tensors else like[0].new_empty(0) for tensors in sent]
        if self._group.process_group is None:
            return flat
        received = like[0].new_empty(sum(sizes))
        dist.all_to_all_single(
            received, torch.cat(flat), list(sizes), [tensor.numel() for tensor in flat], group=self._group.process_group
        )
        return list(received.split_with_sizes(list(sizes)))


def require_whole(entry: Entry, *, whole: bool) -> None:
    """Check that a parameter can be stepped as a matrix.

    Raises:
        ConfigError: If this rank has only a part of it that nobody puts together.
    """
    axes = set(entry.spec.sharded_over) - {"tp"}
    if axes or entry.spec.grid != "dense" or not whole:
        over = ", ".join(sorted(axes)) or "flat ranges"
        raise ConfigError(
            f"{entry.name} is sharded over {over} in the {entry.spec.grid} grid, and an optimizer of whole matrices cannot "
            "step a part. Step it with an element-wise optimizer beside this one: ChainedOptimizer(Muon(...), AdamW(...))."
        )


def _deal(weights: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: the largest first, each to the one of its holders with the least."""
    load, owner = [0] * num_ranks, [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        owner[index] = min(holders[index], key=lambda rank: load[rank])
        load[owner[index]] += weights[index]
    return owner


def _numel(spec: ShardSpec) -> int:
    return torch.Size(spec.global_shape).numel()


def _local_numel(spec: ShardSpec) -> int:
    return torch.Size(spec.local_shape).numel()


def _split(whole: Tensor, spec: ShardSpec) -> list[Tensor]:
    """Return the logical matrices of a whole weight, each with its rows in order."""
    if not spec.fused_rows:
        return [whole]
    periods = whole.view(-1, sum(spec.fused_rows), *whole.shape[1:])
    return [part.reshape(-1, *whole.shape[1:]) for part in periods.split_with_sizes(list(spec.fused_rows), dim=1)]


def _join(matrices: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """Undo :func:`_split`."""
    if not spec.fused_rows:
        return matrices[0]
    num_periods = spec.global_shape[0] // sum(spec.fused_rows)
    parts = [matrix.view(num_periods, -1, *matrix.shape[1:]) for matrix in matrices]
    return torch.cat(parts, dim=1).view(spec.global_shape)


def _place(matrix: Tensor, *, spec: ShardSpec, number: int) -> Pieces:
    """Return where the rows of the logical matrix ``number`` lie in the whole weight."""
    zeros = (0,) * (matrix.dim() - 1)
    if not spec.fused_rows:
        return [((0, *zeros), matrix)]
    period, rows = sum(spec.fused_rows), spec.fused_rows[number]
    first = [0, *accumulate(spec.fused_rows)][number]
    return [
        ((index * period + first, *zeros), part)
        for index, part in enumerate(matrix.split_with_sizes([rows] * (matrix.shape[0] // rows)))
    ]
