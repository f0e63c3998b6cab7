"""Optimizers of full matrices (Muon, https://kellerjordan.github.io/posts/muon): a single rank owns
each matrix.

The buckets assign each parameter to a single data-parallel rank (``buckets.assigned_layout``),
except FSDP2's parameters. An FSDP2 or tensor-parallel matrix has an owner among the ranks with
shards of the matrix. The owner gathers the shards of the gradient before a step and scatters the
result after the step. An all-to-all carries all matrices of a step. Logical matrices of a weight
are stepped apart: the update does not depend on storage or sharding:

    [out, in]            one matrix
      fused              query, key and value; gate and up
    [E, out, in]         one of each expert, or of each expert's gate and up
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.optim.stepping.entries import OptimizerEntry, Target
from megatron_lightning.optim.stepping.main_params import take_over
from megatron_lightning.optim.write_watch import WriteWatch
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import Box, Shard, ShardSpec

_MATRIX_OPTIMIZERS = (Muon,)
_DIVIDED = (
    "The ranks that hold parts of a matrix step it on one of them, which does not see what hooks "
    "write into the parts of others. Write weights in hooks of the start or end of an epoch or "
    "validation, or after every step from the first one on, or step these weights by an "
    "element-wise optimizer: ChainedOptimizer(Muon(...), AdamW(...))."
)


def steps_matrices(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` treats every parameter as a matrix."""
    return isinstance(optimizer, _MATRIX_OPTIMIZERS)


def matrix_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of ``optimizer`` stepped as matrices."""
    return [
        group
        for member in members(optimizer)
        if steps_matrices(member)
        for group in member.param_groups
    ]


def names_of_matrices(
    optimizers: Iterable[Any], names: Mapping[str, nn.Parameter]
) -> frozenset[str]:
    """Return the names of the parameters stepped as matrices by any of the ``optimizers``."""
    groups = [
        group
        for optimizer in optimizers
        if isinstance(optimizer, Optimizer)
        for group in matrix_groups(optimizer)
    ]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(name for name, parameter in names.items() if id(parameter) in stepped)


class _Matrix(NamedTuple):
    """Matrix with a single owner: a weight, or an expert's weight."""

    entry: int
    """Index of the matrix's parameter."""
    box: Box
    """Range of the matrix in the global parameter."""


class _Piece(NamedTuple):
    """A rank's piece of a matrix."""

    matrix: int
    box: Box
    """Range of the global parameter."""
    shard: int
    """Index of the piece's shard in the rank's local tensor."""


class MatrixExchange:
    """Gather full matrices on the owners, and scatter stepped matrices.

    Construction sets the targets of the entries. Construction is a collective of ``group``, like
    the other methods.

    Args:
        held: Parameters, the same on all ranks of the group, and this rank's spec of each, possibly
            empty.
        group: The ranks with shards of the parameters. A group of size 1 for parameters to be split
            only.
        device: Device of the step. None: the device of the parameters.
    """

    def __init__(
        self,
        held: Sequence[tuple[OptimizerEntry, ShardSpec]],
        group: AxisGroup,
        device: torch.device | None = None,
    ) -> None:
        self._entries = [entry for entry, _ in held]
        self._own = [spec for _, spec in held]
        self._group = group
        # Empty, of the right dtype and device: a rank may hold no piece and still takes part.
        self._nothing = next(
            (entry.shard.value for entry in self._entries if entry.shard), torch.empty(0)
        ).new_empty(0)
        # From here on every rank computes the same plan, without further messages: who owns each
        # matrix, and which pieces each pair of ranks exchanges in which order.
        specs = group.all_gather_object(self._own)
        self._matrices = [
            _Matrix(index, box)
            for index, spec in enumerate(self._own)
            for box in _matrices_of(spec.global_shape)
            if any(_overlaps(other_specs[index], box) for other_specs in specs)
        ]
        self._owner = _assign_owners(
            [prod(matrix.box.shape) for matrix in self._matrices],
            # Only holders know the gradient of a matrix.
            [
                [
                    rank
                    for rank, other_specs in enumerate(specs)
                    if _overlaps(other_specs[index], box)
                ]
                for index, box in self._matrices
            ],
            group.size,
        )
        me = group.rank
        self._mine = self._owned_by(me)
        self._received = [self._pieces(other_specs, self._mine) for other_specs in specs]
        """Rank -> the rank's pieces of this rank's matrices."""
        self._held = [self._pieces(specs[me], self._owned_by(rank)) for rank in range(group.size)]
        """Rank -> this rank's pieces of the rank's matrices."""
        self._targets = self._make_targets(device)
        self._watch = WriteWatch()
        self.record()

    def record(self) -> None:
        """Record the parameters as they are now, equal to the rounded matrices of the owners, to
        find later writes.
        """
        if not self.is_local:
            self._watch.record(self._values())

    def look_for_writes(self) -> None:
        """Look before a step for writes into this rank's shards. The step would overwrite such
        writes.

        Raises:
            ConfigError: If shards were written. On GPUs a step later.
        """
        names = [entry.name for entry in self._entries]
        self._watch.look(self._values(), names, _DIVIDED)

    def were_written(self) -> bool:
        """Return the same. Waits for the device."""
        return self._watch.was_written(self._values())

    def _owned_by(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owner) if owner == rank]

    def _pieces(self, specs: Sequence[ShardSpec], numbers: Iterable[int]) -> list[_Piece]:
        """Return a rank's pieces of several matrices, given the rank's specs of the parameters."""
        pieces = []
        for number in numbers:
            index, box = self._matrices[number]
            pieces += [_Piece(number, part, shard) for shard, part in _overlaps(specs[index], box)]
        return pieces

    def _make_targets(self, device: torch.device | None) -> dict[int, list[nn.Parameter]]:
        """Return copies of this rank's matrices by number, several copies for a fused matrix."""
        for entry in self._entries:
            entry.exchanged = True
            entry.targets = []
        targets: dict[int, list[nn.Parameter]] = {}
        for number, matrix in self._gather(self._values()).items():
            index, box = self._matrices[number]
            entry = self._entries[index]
            targets[number] = [
                nn.Parameter(part.to(device or part.device, torch.float32, copy=True).contiguous())
                for part in _split(matrix, entry.spec)
            ]
            entry.targets += [
                Target(target, partial(_place, spec=entry.spec, box=box, number=part))
                for part, target in enumerate(targets[number])
            ]
        return targets

    def gather_gradients(self) -> None:
        """Set the gradient of every matrix, None for unused parameters."""
        shards = [entry.shard for entry in self._entries]
        own_gradients = [None if shard is None else gradient_of(shard.target) for shard in shards]
        values = zip(own_gradients, self._values(), strict=True)
        gradients = [
            torch.zeros_like(value) if gradient is None else gradient for gradient, value in values
        ]
        for number, matrix in self._gather(gradients).items():
            index = self._matrices[number].entry
            parts = _split(matrix, self._entries[index].spec)
            for target, part in zip(self._targets[number], parts, strict=True):
                target.grad = part.to(target) if own_gradients[index] is not None else None

    def scatter_results(self) -> None:
        """Copy the stepped matrices into the parameters of all ranks, and drop the gradients."""
        matrices = {}
        for number, targets in self._targets.items():
            index, box = self._matrices[number]
            joined = _join([target.detach() for target in targets], self._entries[index].spec)
            matrices[number] = joined.view(box.shape).to(self._nothing)
            for target in targets:
                target.grad = None
        self._scatter(matrices)
        self.record()

    def refresh(self, keep: Set[str]) -> None:
        """Copy the parameters into the owners' matrices, except parameters with a global name in
        ``keep``.
        """
        for number, matrix in self._gather(self._values()).items():
            entry = self._entries[self._matrices[number].entry]
            if entry.global_name not in keep:
                parts = _split(matrix, entry.spec)
                for target, part in zip(self._targets[number], parts, strict=True):
                    target.data.copy_(part)

    def take_over(self) -> None:
        """Replace the elements of the owners' matrices written in the parameters."""
        for number, matrix in self._gather(self._values()).items():
            parts = _split(matrix, self._entries[self._matrices[number].entry].spec)
            for target, part in zip(self._targets[number], parts, strict=True):
                take_over(target.data, part.to(target.device))
        self.record()

    @property
    def is_local(self) -> bool:
        """Whether this rank holds all matrices in full."""
        return self._group.process_group is None

    def _values(self) -> list[Tensor]:
        return [
            self._nothing if entry.shard is None else entry.shard.value for entry in self._entries
        ]

    def _gather(self, local: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send this rank's pieces of every matrix to the owner. Return this rank's full matrices by
        number.
        """
        shards = self._shards_of(local)
        received = self._all_to_all(
            [[self._view(shards, piece) for piece in pieces] for pieces in self._held],
            self._received,
            local[0],
        )
        matrices = {number: local[0].new_empty(self._box(number).shape) for number in self._mine}
        for pieces, data in zip(self._received, received, strict=True):
            for piece, part in zip(pieces, data, strict=True):
                matrices[piece.matrix][self._place_of(piece)] = part
        return matrices

    def _scatter(self, full: Mapping[int, Tensor]) -> None:
        """Send every rank's pieces of the owners' matrices, and copy this rank's pieces into the
        parameters.
        """
        values = self._values()
        received = self._all_to_all(
            [
                [full[piece.matrix][self._place_of(piece)] for piece in pieces]
                for pieces in self._received
            ],
            self._held,
            self._nothing,
        )
        shards = self._shards_of(values)
        for pieces, data in zip(self._held, received, strict=True):
            for piece, part in zip(pieces, data, strict=True):
                self._view(shards, piece).copy_(part)

    def _shards_of(self, local: Sequence[Tensor]) -> list[list[Shard]]:
        """Return the shards of this rank's tensor of every parameter."""
        pairs = zip(local, self._own, strict=True)
        return [spec.shards(tensor.view(spec.local_shape)) for tensor, spec in pairs]

    def _view(self, shards: Sequence[Sequence[Shard]], piece: _Piece) -> Tensor:
        """Return a piece of this rank's tensors."""
        shard = shards[self._matrices[piece.matrix].entry][piece.shard]
        return shard.data[piece.box.relative_to(shard.offset).slices]

    def _box(self, number: int) -> Box:
        return self._matrices[number].box

    def _place_of(self, piece: _Piece) -> tuple[slice, ...]:
        return piece.box.relative_to(self._box(piece.matrix).offset).slices

    def _all_to_all(
        self,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[_Piece]],
        like: Tensor,
    ) -> list[list[Tensor]]:
        """Send a list of tensors to every rank. Return the tensors received from each rank."""
        flat = [
            torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)
            for tensors in sent
        ]
        # Both sides know all sizes by the plan, so one message for each pair of ranks is enough.
        if self._group.process_group is not None:
            sizes = [sum(prod(piece.box.shape) for piece in pieces) for pieces in expected]
            buffer = like.new_empty(sum(sizes))
            dist.all_to_all_single(
                buffer,
                torch.cat(flat),
                sizes,
                [tensor.numel() for tensor in flat],
                group=self._group.process_group,
            )
            flat = list(buffer.split_with_sizes(sizes))
        return [
            [
                part.view(piece.box.shape)
                for piece, part in zip(
                    pieces,
                    data.split_with_sizes([prod(piece.box.shape) for piece in pieces]),
                    strict=True,
                )
            ]
            for pieces, data in zip(expected, flat, strict=True)
        ]


def is_split(spec: ShardSpec, context: ParallelContext) -> bool:
    """Return whether tensor-parallel ranks hold different shards of a parameter."""
    group = tensor_group(spec, context)
    return group.name in spec.sharded_over and group.size > 1


def tensor_group(spec: ShardSpec, context: ParallelContext) -> AxisGroup:
    """Return the tensor-parallel ranks that shard such parameters."""
    return context.etp if spec.is_expert else context.tp


def is_several(spec: ShardSpec) -> bool:
    """Return whether a weight consists of several matrices."""
    return bool(spec.fused_rows) or len(spec.global_shape) > 2


def require_unsharded(
    entry: OptimizerEntry, shard: ParameterShard, context: ParallelContext
) -> None:
    """Check that no axis other than tensor parallelism shards a matrix."""
    # Experts of other ranks are different matrices.
    stacked = {"ep"} if len(entry.spec.global_shape) > 2 else set()
    axes = [
        axis
        for axis in entry.spec.sharded_over
        if axis not in {"tp", "etp", *stacked} and context.axis(axis).size > 1
    ]
    if axes or tuple(shard.value.shape) != entry.spec.local_shape:
        raise ConfigError(
            f"{entry.name} is sharded over {', '.join(axes) or 'flat ranges'}, and an optimizer of "
            "full matrices cannot step a part. Step it with an element-wise optimizer alongside: "
            "ChainedOptimizer(Muon(...), AdamW(...))."
        )


def _matrices_of(shape: Sequence[int]) -> list[Box]:
    """Return the ranges of a parameter's matrices: all of [out, in], or a range for each expert."""
    if len(shape) <= 2:
        return [Box.full(shape)]
    experts, *matrix = shape
    return [Box((expert, 0, 0), (1, *matrix)) for expert in range(experts)]


def _overlaps(spec: ShardSpec, box: Box) -> list[tuple[int, Box]]:
    """Return a rank's ranges of ``box``, each with the index of the shard."""
    overlaps = ((shard, box_of_shard.overlap(box)) for shard, box_of_shard in enumerate(spec.boxes))
    return [(shard, common) for shard, common in overlaps if common is not None]


def _assign_owners(
    weights: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int
) -> list[int]:
    """Return the owner of each matrix: the largest first, each to the least loaded of the
    holders.
    """
    load, owner = [0] * num_ranks, [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        owner[index] = min(holders[index], key=lambda rank: load[rank])
        load[owner[index]] += weights[index]
    return owner


def _split(full: Tensor, spec: ShardSpec) -> list[Tensor]:
    """Return the logical matrices of a weight or of an expert's [1, out, in], each with the rows in
    order.
    """
    matrix = full.view(full.shape[-2:])
    if not spec.fused_rows:
        return [matrix]
    columns = matrix.shape[1]
    periods = matrix.view(-1, sum(spec.fused_rows), columns)
    return [
        part.reshape(-1, columns) for part in periods.split_with_sizes(list(spec.fused_rows), dim=1)
    ]


def _join(matrices: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """Undo :func:`_split`, to [out, in]."""
    if not spec.fused_rows:
        return matrices[0]
    *_, rows, columns = spec.global_shape
    num_periods = rows // sum(spec.fused_rows)
    parts = [matrix.view(num_periods, -1, columns) for matrix in matrices]
    return torch.cat(parts, dim=1).view(rows, columns)


def _place(matrix: Tensor, *, spec: ShardSpec, box: Box, number: int) -> list[Shard]:
    """Return the rows of the logical matrix ``number`` of the weight at ``box`` as shards of the
    parameter.
    """
    leading = box.offset[:-2]
    stacked = matrix[(None,) * len(leading)]
    if not spec.fused_rows:
        return [Shard(box.offset, stacked)]
    period, rows = sum(spec.fused_rows), spec.fused_rows[number]
    first = [0, *accumulate(spec.fused_rows)][number]
    return [
        Shard((*leading, index * period + first, 0), part)
        for index, part in enumerate(torch.split(stacked, rows, dim=-2))
    ]
