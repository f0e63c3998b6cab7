"""The tensors that an optimizer of full tensors steps for a parameter.

    WHOLE       [out, in]            the parameter, as one process has it (fused projections too)
                [E, out, in]         the stack of experts
    EXPERTS     [out, in]            the same
                [E, out, in]         [1, out, in] of each expert
    MATRICES    [out, in]            the matrix, or each of the fused matrices: query, key and
                                     value; gate and up
                [E, out, in]         the matrices of each expert

A unit is the part of a parameter with one owner: the parameter, or an expert's weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from megatron_lightning.parallel.shards.spec import Box, Shard, ShardSpec

_MATRIX = 2  # dims


class Units(Enum):
    """Kind of the stepped tensors."""

    WHOLE = "whole"
    EXPERTS = "experts"
    MATRICES = "matrices"

    def boxes(self, spec: ShardSpec) -> list[Box]:
        """Return the range of each unit in the global parameter."""
        shape = spec.global_shape
        is_divided = is_stack(spec) if self is Units.EXPERTS else len(shape) > _MATRIX
        if self is Units.WHOLE or not is_divided:
            return [Box.full(shape)]
        experts, *matrix = shape
        first = (0,) * len(matrix)
        return [Box((expert, *first), (1, *matrix)) for expert in range(experts)]

    def split(self, unit: Tensor, spec: ShardSpec) -> list[Tensor]:
        """Return the stepped tensors of a unit."""
        if self is not Units.MATRICES:
            return [unit]
        matrix = unit.view(unit.shape[-_MATRIX:])
        if not spec.fused_rows:
            return [matrix]
        columns = matrix.shape[1]
        periods = matrix.view(-1, sum(spec.fused_rows), columns)
        parts = periods.split_with_sizes(list(spec.fused_rows), dim=1)
        return [part.reshape(-1, columns) for part in parts]

    def join(self, tensors: Sequence[Tensor], spec: ShardSpec) -> Tensor:
        """Undo :meth:`split`, but for leading dims of size 1."""
        if self is not Units.MATRICES or not spec.fused_rows:
            return tensors[0]
        *_, rows, columns = spec.global_shape
        num_periods = rows // sum(spec.fused_rows)
        parts = [tensor.view(num_periods, -1, columns) for tensor in tensors]
        return torch.cat(parts, dim=1).view(rows, columns)

    def place(self, tensor: Tensor, *, spec: ShardSpec, box: Box, number: int) -> list[Shard]:
        """Return the shards of the parameter in the stepped tensor ``number`` of the unit at
        ``box``.
        """
        if self is not Units.MATRICES:
            return [Shard(box.offset, tensor)]
        leading = box.offset[:-_MATRIX]
        stacked = tensor[(None,) * len(leading)]
        if not spec.fused_rows:
            return [Shard(box.offset, stacked)]
        period, rows = sum(spec.fused_rows), spec.fused_rows[number]
        first = [0, *accumulate(spec.fused_rows)][number]
        return [
            Shard((*leading, index * period + first, 0), part)
            for index, part in enumerate(torch.split(stacked, rows, dim=-_MATRIX))
        ]


def is_stack(spec: ShardSpec) -> bool:
    """Return whether a parameter stacks the matrices of experts."""
    return spec.is_expert and len(spec.global_shape) > _MATRIX


def is_several(spec: ShardSpec) -> bool:
    """Return whether a weight consists of several matrices."""
    return bool(spec.fused_rows) or len(spec.global_shape) > _MATRIX
