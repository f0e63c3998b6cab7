"""Where a tensor that a module of this rank has seen lies in the tensor of one device.

Dims are recognized by size: rows by the micro-batch, positions by the rank's part of the sequence,
features by the shards of the module's weight. A tensor of other sizes has no known place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor, nn

from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.shards.spec import Box, Shape, Shard, ShardSpec

Spans = Sequence[range]
"""Ranges of a global dim, in the order of the local dim."""


@dataclass(frozen=True)
class Features:
    """Last dim of a tensor on this rank."""

    size: int
    """Entries of one device."""
    spans: Spans
    """Those of this rank."""

    @classmethod
    def of(cls, module: nn.Module, kind: str, spec: ShardSpec | None) -> Features | None:
        """Return the features of a linear layer with a sharded weight. None: full features.

        Args:
            module: The layer.
            kind: ``inputs`` or ``outputs``.
            spec: Of the layer's weight.
        """
        if spec is None or not isinstance(module, nn.Linear):
            return None
        dim = 0 if kind == "outputs" else 1
        spans = tuple(range(b.offset[dim], b.offset[dim] + b.shape[dim]) for b in spec.boxes)
        return cls(spec.global_shape[dim], spans)


@dataclass(frozen=True)
class Placement:
    """The part of a step's activations that this rank sees.

    Args:
        context: Groups of this rank.
        rows: Rows of a micro-batch.
        length: Positions of a full sequence. 0: rows have no positions.
        sequence_dims: Dims of the positions to try, in order.
        divides_sequence: Whether tensor-parallel ranks share sequences, too.
    """

    context: ParallelContext
    rows: int
    length: int
    sequence_dims: tuple[int, ...]
    divides_sequence: bool

    def shards(
        self, calls: Sequence[Tensor], features: Features | None
    ) -> tuple[Shape, list[Shard]] | None:
        """Return global shape and shards of the tensors of all micro-batches, in order. None: the
        place is unknown.
        """
        first = calls[0]
        if any(call.shape != first.shape for call in calls) or first.dim() == 0:
            return None
        if self._is_whole and len(calls) == 1:
            return tuple(first.shape), [Shard((0,) * first.dim(), first)]
        dims = self._dims(first.shape)
        last = self._last(first, features)
        if dims is None or last is None:
            return None
        row_dim, sequence_dim, positions = dims
        shape = list(first.shape)
        spans: list[Spans] = [(range(size),) for size in first.shape]
        replicas = self.context.dp
        shape[row_dim] = self.rows * len(calls) * replicas.size
        if sequence_dim is not None:
            shape[sequence_dim], spans[sequence_dim] = self.length, positions
        if first.dim() - 1 not in {row_dim, sequence_dim}:
            shape[-1], spans[-1] = last.size, tuple(last.spans)
        shards = []
        for number, call in enumerate(calls):
            spans[row_dim] = self._rows(number)
            shards += list(_cut(call, spans))
        return tuple(shape), shards

    @property
    def _is_whole(self) -> bool:
        """Whether this rank sees every row and position, and all features."""
        return self.context.tp.size * self.context.cp.size * self.context.dp.size == 1

    def _rows(self, number: int) -> tuple[range, ...]:
        """Return the rows of a micro-batch. Samplers deal samples to the replicas in turn."""
        replicas = self.context.dp
        begin = number * self.rows
        rows = range(begin, begin + self.rows)
        if replicas.size == 1:
            return (rows,)
        places = (row * replicas.size + replicas.rank for row in rows)
        return tuple(range(place, place + 1) for place in places)

    def _dims(self, shape: Shape) -> tuple[int, int | None, tuple[range, ...]] | None:
        """Return the dims of rows and of positions, and this rank's positions."""
        fitting = []
        for sequence_dim in self.sequence_dims:
            row_dim = 1 - sequence_dim
            if len(shape) < 2 or shape[row_dim] != self.rows:
                continue
            positions = self._positions(shape[sequence_dim])
            if positions is not None:
                fitting.append((row_dim, sequence_dim, positions))
        if fitting:
            # Token ids may be [s, b] or [b, s]. Hidden states follow the plan.
            return fitting[0] if len(fitting) == 1 or len(shape) > 2 else None
        is_shared = self.context.cp.size > 1 or self.divides_sequence
        return None if is_shared or shape[0] != self.rows else (0, None, ())

    def _positions(self, size: int) -> tuple[range, ...] | None:
        """Return the positions of a dim. None: the dim has no positions."""
        context = self.context
        part = SequencePart(context.cp.rank, context.cp.size)
        if self.length == 0 or self.length % (2 * context.cp.size if context.cp.size > 1 else 1):
            return None
        spans, own = part.spans(self.length), self.length // context.cp.size
        if size == own:
            return spans
        if self.divides_sequence and size * context.tp.size == own:
            return tuple(_between(spans, context.tp.rank * size, (context.tp.rank + 1) * size))
        return None

    def _last(self, tensor: Tensor, features: Features | None) -> Features | None:
        size = tensor.shape[-1]
        if features is None or size == features.size:
            return Features(size, (range(size),))
        return features if sum(map(len, features.spans)) == size else None


def _between(spans: Spans, first: int, end: int) -> Iterator[range]:
    """Yield the places of the local entries from ``first`` to before ``end``."""
    begin = 0
    for span in spans:
        low, high = max(first - begin, 0), min(end - begin, len(span))
        if low < high:
            yield span[low:high]
        begin += len(span)


def _cut(local: Tensor, spans: Sequence[Spans]) -> Iterator[Shard]:
    """Yield the parts of a local tensor at their places in the global tensor."""
    per_dim = []
    for places in spans:
        begins = [sum(map(len, places[:index])) for index in range(len(places))]
        per_dim.append(list(zip(places, begins, strict=True)))
    for chosen in product(*per_dim):
        here = Box(tuple(begin for _, begin in chosen), tuple(len(place) for place, _ in chosen))
        yield Shard(tuple(place.start for place, _ in chosen), local[here.slices])
