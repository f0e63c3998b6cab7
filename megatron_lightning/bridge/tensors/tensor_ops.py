"""How a parameter of ``GPTModel`` is made of tensors of a folder: moves of elements in plain torch.

A move runs on lazy tensors, so that any box of the result is read from the source boxes of the
result. The way back is derived from the same record. For a new folder a move returns the shapes of
the folder's tensors.

Notation: ``h`` hidden, ``n`` query heads, ``g`` query groups, ``d`` head dim, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lightning.config import DeltaNetConfig, TransformerConfig
from megatron_lightning.parallel.shards.spec import Shape


class Move(Protocol):
    """Recipe of a parameter from several tensors."""

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parameter."""

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """Return the shapes of the tensors of ``num_sources`` row entries, for a parameter of
        ``shape``. A single entry names the tensors of all experts.
        """


@dataclass(frozen=True)
class Copied(Move):
    """The unchanged tensor."""

    transposed: bool = False
    """Whether matrices are stored as [inputs, outputs]."""

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        (tensor,) = tensors
        return tensor.t() if self.transposed else tensor

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        return [shape[::-1] if self.transposed else shape]


@dataclass(frozen=True)
class QueryKeyValue(Move):
    """Rows of a query group: queries, key, value. Theirs are all queries, all keys and all values,
    in three tensors or stacked vertically in a fused tensor.

    With ``attention_output_gate`` the gates of a group lie behind the queries. Theirs have the gate
    of each head behind the query of the head.
    """

    transposed: bool = False
    """Whether matrices are stored as [inputs, outputs]."""

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        if len(tensors) == 1:
            tensor = tensors[0].t() if self.transposed else tensors[0]
            tensors = torch.split(tensor, self._rows(config))
        groups, size = config.query_groups, config.head_dim
        parts = [x.reshape(groups, -1, size, *x.shape[1:]) for x in tensors]
        if config.attention_output_gate:
            queries = parts[0].reshape(groups, -1, 2, *parts[0].shape[2:])
            parts[0] = queries.transpose(1, 2).flatten(1, 2)
        return torch.cat(parts, dim=1).flatten(0, 2)

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        if num_sources == 1:
            return [shape[::-1] if self.transposed else shape]
        return [(rows, *shape[1:]) for rows in self._rows(config)]

    def _rows(self, config: TransformerConfig) -> list[int]:
        keys, queries = config.query_groups * config.head_dim, 1 + config.attention_output_gate
        return [config.num_attention_heads * config.head_dim * queries, keys, keys]


@dataclass(frozen=True)
class Stacked(Move):
    """Matrices of equal size stacked vertically, such as gate and up."""

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        return torch.cat(list(tensors))

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        return [(shape[0] // num_sources, *shape[1:])] * num_sources


@dataclass(frozen=True)
class StackedExperts(Move):
    """A tensor of all experts [E, …] in one piece."""

    transposed: bool = False
    """Whether the matrices of experts are stored as [inputs, outputs]."""
    interleaved: bool = False
    """Whether outputs alternate between gate and up."""

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        (tensor,) = tensors
        tensor = tensor.transpose(1, 2) if self.transposed else tensor
        if not self.interleaved:
            return tensor
        num_experts, _, *inputs = tensor.shape
        return tensor.reshape(num_experts, -1, 2, *inputs).transpose(1, 2).flatten(1, 2)

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        return [(shape[0], *shape[:0:-1]) if self.transposed else shape]


@dataclass(frozen=True)
class Experts(Move):
    """Matrices of every expert, stacked [E, …]. The matrices of an expert are stacked
    vertically.
    """

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        num_experts = 1 if config.moe is None else config.moe.num_experts
        starts = range(0, len(tensors), num_experts)
        return torch.cat([torch.stack(tensors[i : i + num_experts]) for i in starts], dim=1)  # type: ignore[arg-type]

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        return [(shape[1] // num_sources, *shape[2:])] * num_sources


@dataclass(frozen=True)
class DeltaNetRows(Move):
    """Rows of gated delta net: queries, keys, values, gates, beta, alpha, each by head. Theirs are
    ordered by key head, in two tensors: queries, keys, values and gates, and beta and alpha.
    """

    def join(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """See :class:`Move`."""
        by_key_head = [rows.reshape(self._sizes(config).num_key_heads, -1, *rows.shape[1:])
                       for rows in tensors]  # fmt: skip
        parts = [
            part
            for rows, widths in zip(by_key_head, self._widths(config), strict=True)
            for part in torch.split(rows, widths, 1)
        ]
        return torch.cat([part.flatten(0, 1) for part in parts])

    def shapes(self, config: TransformerConfig, shape: Shape, num_sources: int) -> list[Shape]:
        """See :class:`Move`."""
        keys = self._sizes(config).num_key_heads
        return [(keys * sum(widths), *shape[1:]) for widths in self._widths(config)]

    def _widths(self, config: TransformerConfig) -> list[list[int]]:
        """Return the rows of a key head in both tensors."""
        sizes = self._sizes(config)
        widths = [part // sizes.num_key_heads for part in sizes.in_parts]
        return [widths[:4], widths[4:]]

    def _sizes(self, config: TransformerConfig) -> DeltaNetConfig:
        return config.delta_net or DeltaNetConfig()
