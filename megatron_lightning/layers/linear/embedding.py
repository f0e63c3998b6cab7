"""Embeddings split over the tensor-parallel ranks: words by rows of the vocabulary, positions along
the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.change_class import change_class, changed_class
from megatron_lightning.layers.linear.replaceable import check_replaceable
from megatron_lightning.parallel.collectives import reduce_from_axis, reduce_scatter, scatter
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.sharding import take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec


def local_ids(ids: Tensor, start: int, num_rows: int, group: AxisGroup) -> tuple[Tensor, Tensor]:
    """Return the ids [...] relative to this rank's rows, with 0 for ids of other ranks, and a mask
    of the ids of other ranks.

    Ids outside the vocabulary stay unchanged on the nearest rank, so that the look-up fails like on
    one device.
    """
    local = ids - start
    is_outside = torch.zeros_like(local, dtype=torch.bool)
    if group.rank > 0:
        is_outside = is_outside | (local < 0)
    if group.rank < group.size - 1:
        is_outside = is_outside | (local >= num_rows)
    return local.masked_fill(is_outside, 0), is_outside


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with rows split over the ranks.

    If the ranks do not divide the vocabulary, the last ranks hold fewer rows.

    Args:
        num_embeddings: Entries of the full vocabulary.
        embedding_dim: Size of a vector.
        group: The tensor-parallel ranks.
        padding_idx: Entry without a gradient.
        sequence_parallel: Return a shard of the output along the sequence.
        sequence_dim: Dim of the sequence.
        device: Device of the parameter.
        dtype: Type of the parameter.

    Raises:
        ShardingError: If there are ranks without a row.
    """

    group: AxisGroup
    sequence_parallel: bool = False
    sequence_dim: int = 0
    start: int
    shard_specs: dict[str, ShardSpec]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: AxisGroup,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype
        )
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self._divide()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, **options: Any) -> VocabParallelEmbedding:
        """Reduce ``embedding`` to this rank's rows, in place, and return the embedding.

        Hooks, attributes and the parameter object stay. ``options`` are keywords of the
        constructor.

        Raises:
            ShardingError: If the embedding uses an option without a parallel form, or cannot be
                split. The embedding is then unchanged.
        """
        check_replaceable(embedding, (nn.Embedding,), cls.__name__)
        _check_options(embedding)
        with changed_class(embedding, cls, **options) as layer:
            layer._divide()
        return layer

    def _divide(self) -> None:
        """Keep this rank's rows of the full table."""
        self.sequence_parallel = self.sequence_parallel and self.group.size > 1
        spec = _rows_spec(self, self.group)
        self.start = spec.boxes[0].offset[0]
        take_shards(self, self, {"weight": spec})

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to vectors [..., h], or to this rank's sequence shard of the vectors."""
        local, is_outside = local_ids(ids, self.start, self.weight.shape[0], self.group)
        padding = None if self.padding_idx is None else self.padding_idx - self.start
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        partial = F.embedding(local, self.weight, padding).masked_fill(is_outside[..., None], 0.0)
        if self.sequence_parallel:
            return reduce_scatter(partial, self.group, self.sequence_dim)
        return reduce_from_axis(partial, self.group)


def _check_options(embedding: nn.Embedding) -> None:
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ShardingError(
            "this embedding uses max_norm, scale_grad_by_freq or sparse, which need the full "
            "table on one rank. Build it without them, or leave it out of the plan."
        )


def _rows_spec(embedding: nn.Embedding, group: AxisGroup) -> ShardSpec:
    """Return the spec of this rank's rows of an embedding."""
    shape = (embedding.num_embeddings, embedding.embedding_dim)
    return ShardSpec.split_rows(shape, size=group.size, rank=group.rank, axis=group.name)


def shard_vocabulary(
    embedding: nn.Embedding, *, group: AxisGroup, sequence_parallel: bool, sequence_dim: int
) -> nn.Embedding:
    """Replace the weight of an embedding with a custom forward (scaled, for example) by this rank's
    rows, in place.

    The forward must map each id separately. The forward runs on local ids, and the outputs for ids
    of other ranks are dropped, like in :class:`VocabParallelEmbedding`. The gradients of other
    parameters (of a norm) are partial sums.
    """
    spec = _rows_spec(embedding, group)
    partial = {
        name: ShardSpec.replicated(parameter.shape, partial_over=(group.name,))
        for name, parameter in embedding.named_parameters(recurse=False)
    }
    take_shards(embedding, embedding, {**partial, "weight": spec})
    # Everything but the table sees only the tokens of this rank's rows, so its gradients are
    # partial sums over the group.
    for child in list(embedding.modules())[1:]:
        child.shard_specs = {  # type: ignore[assignment]
            name: ShardSpec.replicated(parameter.shape, partial_over=(group.name,))
            for name, parameter in child.named_parameters(recurse=False)
        }
    start, rows = spec.boxes[0].offset[0], spec.boxes[0].shape[0]
    # One rank holds the padding row, by its local index.
    if embedding.padding_idx is not None:
        local_index = embedding.padding_idx - start
        embedding.padding_idx = local_index if 0 <= local_index < rows else None
    hooks = _OwnRows(group, start, rows, sequence_dim if sequence_parallel else None)
    embedding.register_forward_pre_hook(hooks.enter)
    embedding.register_forward_hook(hooks.leave)
    return embedding


class _OwnRows:
    """Hooks around the forward of an embedding with one rank's rows."""

    def __init__(self, group: AxisGroup, start: int, rows: int, sequence_dim: int | None) -> None:
        self._group = group
        self._start = start
        self._rows = rows
        self._sequence_dim = sequence_dim
        self._outside = torch.empty(0)

    def enter(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, self._outside = local_ids(args[0], self._start, self._rows, self._group)
        return (ids, *args[1:])

    def leave(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        partial = output.masked_fill(self._outside[..., None], 0.0)
        if self._sequence_dim is not None:
            return reduce_scatter(partial, self._group, self._sequence_dim)
        return reduce_from_axis(partial, self._group)


class SequenceParallelEmbedding(nn.Embedding):
    """Replicated embedding that each rank evaluates only for its sequence shard (learned
    positions).
    """

    group: AxisGroup
    sequence_dim: int
    shard_specs: dict[str, ShardSpec]

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: AxisGroup, sequence_dim: int
    ) -> SequenceParallelEmbedding:
        """Change ``embedding`` in place, and return the embedding.

        Raises:
            ShardingError: If the embedding uses an option without a parallel form.
        """
        _check_options(embedding)
        spec = ShardSpec.replicated(embedding.weight.shape, partial_over=(group.name,))
        return change_class(
            embedding, cls, group=group, sequence_dim=sequence_dim, shard_specs={"weight": spec}
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [s, ...] to vectors [s / ranks, ..., h].

        The dim of one-dimensional ids is the sequence.
        """
        dim = min(self.sequence_dim, ids.dim() - 1)
        return F.embedding(scatter(ids, self.group, dim), self.weight, self.padding_idx)
