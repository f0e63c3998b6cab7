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
from megatron_lightning.layers.replaceable import check_replaceable
from megatron_lightning.parallel.collectives import reduce_from_axis, reduce_scatter, scatter
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import take_shards
from megatron_lightning.parallel.spec import ShardSpec


def local_ids(ids: Tensor, start: int, num_rows: int, group: AxisGroup) -> tuple[Tensor, Tensor]:
    """Return the ids [...] relative to this rank's rows, 0 for those of other ranks, and a mask of
    the latter.

    Ids outside the vocabulary stay as they are on the nearest rank, so that the look-up there fails
    as on one device.
    """
    local = ids - start
    outside = torch.zeros_like(local, dtype=torch.bool)
    if group.rank > 0:
        outside = outside | (local < 0)
    if group.rank < group.size - 1:
        outside = outside | (local >= num_rows)
    return local.masked_fill(outside, 0), outside


class VocabParallelEmbedding(nn.Embedding):
    """Embedding whose rows are split over the ranks; if these do not divide the vocabulary, the
    last ones hold fewer rows.

    Args:
        num_embeddings: Entries of the full vocabulary.
        embedding_dim: Size of a vector.
        group: The tensor-parallel ranks.
        padding_idx: Entry that gets no gradient.
        sequence_parallel: Return a shard of the output along the sequence.
        sequence_dim: Dim of the sequence.
        device: Where the parameter lives.
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
        """Make ``embedding`` this rank's rows of itself, in place, and return it.

        Its hooks, attributes and parameter object stay; ``options`` are keywords of the
        constructor.

        Raises:
            ShardingError: If it uses an option that has no parallel form, or cannot be split; it is
                unchanged then.
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
        """Map ids [...] to vectors [..., h], or to this rank's sequence shard of them."""
        local, outside = local_ids(ids, self.start, self.weight.shape[0], self.group)
        padding = None if self.padding_idx is None else self.padding_idx - self.start
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        partial = F.embedding(local, self.weight, padding).masked_fill(outside[..., None], 0.0)
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
    """Replace the weight of an embedding that has a forward of its own (a scaled one) by this
    rank's rows, in place.

    Its forward must map each id alone. It runs on local ids, and what it makes of those of other
    ranks is dropped, as in :class:`VocabParallelEmbedding`; the gradients of other parameters (of a
    norm) are partial sums.
    """
    spec = _rows_spec(embedding, group)
    partial = {
        name: ShardSpec.replicated(parameter.shape, partial_over=(group.name,))
        for name, parameter in embedding.named_parameters(recurse=False)
    }
    take_shards(embedding, embedding, {**partial, "weight": spec})
    for child in list(embedding.modules())[1:]:
        child.shard_specs = {  # type: ignore[assignment]
            name: ShardSpec.replicated(parameter.shape, partial_over=(group.name,))
            for name, parameter in child.named_parameters(recurse=False)
        }
    start, rows = spec.boxes[0].offset[0], spec.boxes[0].shape[0]
    if embedding.padding_idx is not None:
        local = embedding.padding_idx - start
        embedding.padding_idx = local if 0 <= local < rows else None
    hooks = _OwnRows(group, start, rows, sequence_dim if sequence_parallel else None)
    embedding.register_forward_pre_hook(hooks.enter)
    embedding.register_forward_hook(hooks.leave)
    return embedding


class _OwnRows:
    """Hooks around the forward of an embedding that holds one rank's rows."""

    def __init__(self, group: AxisGroup, start: int, rows: int, sequence_dim: int | None) -> None:
        self._group = group
        self._start = start
        self._rows = rows
        self._sequence_dim = sequence_dim
        self._outside = torch.empty(0)

    def enter(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        local, self._outside = local_ids(args[0], self._start, self._rows, self._group)
        return (local, *args[1:])

    def leave(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        partial = output.masked_fill(self._outside[..., None], 0.0)
        if self._sequence_dim is not None:
            return reduce_scatter(partial, self._group, self._sequence_dim)
        return reduce_from_axis(partial, self._group)


class SequenceParallelEmbedding(nn.Embedding):
    """Embedding that every rank holds in full and looks up for its sequence shard only (learned
    positions).
    """

    group: AxisGroup
    sequence_dim: int
    shard_specs: dict[str, ShardSpec]

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: AxisGroup, sequence_dim: int
    ) -> SequenceParallelEmbedding:
        """Change ``embedding`` in place, and return it.

        Raises:
            ShardingError: If it uses an option that has no parallel form.
        """
        _check_options(embedding)
        spec = ShardSpec.replicated(embedding.weight.shape, partial_over=(group.name,))
        return change_class(
            embedding, cls, group=group, sequence_dim=sequence_dim, shard_specs={"weight": spec}
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [s, ...] to vectors [s / ranks, ..., h]; of one dim, that is the sequence's."""
        dim = min(self.sequence_dim, ids.dim() - 1)
        return F.embedding(scatter(ids, self.group, dim), self.weight, self.padding_idx)
