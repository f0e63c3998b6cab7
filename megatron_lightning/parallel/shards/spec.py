"""How each parameter is sharded over the ranks.

A parameter is a plain local ``nn.Parameter``. The parameter's :class:`ShardSpec` gives the boxes of
the global tensor in the local tensor, the axes of the sharding, and the axes over which the
gradient is a partial sum. Axis names are unique and are recorded at size 1 too, so the spec also
gives the axes of replication. A parameter with ``ep`` or ``etp`` is an expert's, replicated over
``edp``. Every other parameter is dense, replicated over ``dp`` and ``cp``. Gradient reduction,
gradient norm, initialization and checkpoints read the spec. No other code guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.shards.stored_weight import StoredWeight

if TYPE_CHECKING:
    from megatron_lightning.parallel.grid.context import ParallelContext

Shape = tuple[int, ...]


class Box(NamedTuple):
    """An n-dimensional range of a tensor, mostly of a global tensor."""

    offset: Shape
    """First index."""
    shape: Shape
    """Extent."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def shifted(self, by: Shape) -> Box:
        """Return the box moved by an offset."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, origin: Shape) -> Box:
        """Return the box in a tensor with the first index ``origin``."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of a tensor. None: empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self.offset, self.shape, other.offset, other.shape, low, strict=True)
        extent = tuple(max(0, min(a + n, b + m) - start) for a, n, b, m, start in ends)
        return Box(low, extent) if prod(extent) else None


class Shard(NamedTuple):
    """Data of a box of a global tensor, on this rank."""

    offset: Shape
    """First index in the global tensor."""
    data: Tensor
    """View of this rank's memory, of the box's shape."""

    @property
    def box(self) -> Box:
        """The range of the global tensor."""
        return Box(self.offset, tuple(self.data.shape))


@dataclass(frozen=True)
class ShardSpec:
    """Relation of a parameter's local tensor to the global tensor."""

    global_shape: Shape
    """Shape of the full parameter, as in a single process."""
    boxes: tuple[Box, ...]
    """Ranges of the global tensor on this rank. The local tensor stacks the ranges along
    ``stacked_dim``."""
    sharded_over: tuple[str, ...] = ()
    """Axes with different boxes on different ranks, at size 1 too. An expert's dims may be split
    over ``ep`` and ``etp``."""
    partial_over: tuple[str, ...] = ()
    """Axes with equal values but partial gradients on the ranks. The gradients must be summed."""
    tied_to: str | None = None
    """Global name of the parameter copied by this parameter (tied embeddings). None: this parameter
    is the owner."""
    fused_rows: tuple[int, ...] = ()
    """Rows of the logical matrices stacked, period after period, in the rows (dim -2) of the global
    tensor: (f, f) for gate and up, (n/g x d, d, d) for query, key and value of each group. (): a
    single matrix, or [E, rows, columns] with a matrix for each expert."""
    stacked_dim: int = 0
    """Dim for stacking several boxes."""

    @classmethod
    def replicated(cls, shape: Sequence[int], *, partial_over: tuple[str, ...] = ()) -> ShardSpec:
        """Return the spec of a parameter held in full by every rank."""
        return cls(tuple(shape), (Box.full(shape),), partial_over=partial_over)

    @classmethod
    def split(
        cls,
        shape: Sequence[int],
        *,
        dim: int,
        size: int,
        rank: int,
        axis: str = "tp",
        blocks: int = 1,
    ) -> ShardSpec:
        """Return the spec of rank ``rank``'s shard of a tensor split along ``dim`` over ``size``
        ranks.

        Args:
            shape: Global shape.
            dim: The split dim.
            size: Ranks on the axis.
            rank: This rank's position on the axis.
            axis: Name of the axis.
            blocks: Equal blocks stacked along ``dim``, each of them split (2 for a fused gate and
                up projection).

        Raises:
            ShardingError: If a block cannot be split evenly.
        """
        full = tuple(shape)
        blocks = blocks if size > 1 else 1
        if full[dim] % (blocks * size):
            raise ShardingError(
                f"dim {dim} of shape {full} has {full[dim]} entries, which {blocks} block(s) x "
                f"{size} {axis} ranks do not divide. Choose a multiple of {blocks * size}."
            )
        block = full[dim] // blocks
        length = block // size
        # Blocks (as of a gate and an up projection) are split one by one: a rank holds a range of
        # each.
        offsets = (
            (*(0,) * dim, b * block + rank * length, *(0,) * (len(full) - dim - 1))
            for b in range(blocks)
        )
        boxes = tuple(Box(offset, (*full[:dim], length, *full[dim + 1 :])) for offset in offsets)
        return cls(full, boxes, sharded_over=(axis,), stacked_dim=dim)

    @classmethod
    def split_parts(
        cls, shape: Sequence[int], *, parts: Sequence[int], size: int, rank: int, axis: str = "tp"
    ) -> ShardSpec:
        """Return the spec of rank ``rank``'s share of every part of the rows: a projection to
        unequal parts.

        Args:
            shape: Global shape. The parts are stacked in dim 0.
            parts: Rows of the parts, in order.
            size: Ranks on the axis.
            rank: This rank's position on the axis.
            axis: Name of the axis.

        Raises:
            ShardingError: If the parts are not the rows, or a part cannot be split evenly.
        """
        rows, *others = shape
        if sum(parts) != rows:
            raise ShardingError(
                f"parts of {', '.join(map(str, parts))} rows were named for a tensor of {rows} "
                "rows. Correct the parts."
            )
        full, none = tuple(others), (0,) * len(others)
        if size == 1:
            return cls((rows, *full), (Box.full(shape),), sharded_over=(axis,))
        uneven = next((part for part in parts if part % size), None)
        if uneven is not None:
            raise ShardingError(
                f"a part of {uneven} rows cannot be split over {size} {axis} ranks. Choose a "
                f"multiple of {size}."
            )
        # Each rank takes its share of every part, so that the local rows have the order of the full
        # rows.
        starts = (end - part for end, part in zip(accumulate(parts), parts, strict=True))
        boxes = tuple(
            Box((start + rank * (part // size), *none), (part // size, *full))
            for start, part in zip(starts, parts, strict=True)
        )
        return cls((rows, *full), boxes, sharded_over=(axis,))

    @classmethod
    def split_rows(
        cls, shape: Sequence[int], *, size: int, rank: int, axis: str = "tp"
    ) -> ShardSpec:
        """Return the spec of rank ``rank``'s rows of a table that need not divide evenly: see
        :func:`shard_range`.
        """
        rows, *others = shape
        start, length = shard_range(rows, size, rank)
        if shard_range(rows, size, size - 1)[1] == 0:
            raise ShardingError(
                f"{rows} rows are too few for {size} {axis} ranks: in equal parts rounded up, the "
                f"last would have none. Choose at least {size * (size - 1)} rows, or fewer ranks."
            )
        return cls(
            (rows, *others),
            (Box((start, *(0 for _ in others)), (length, *others)),),
            sharded_over=(axis,),
        )

    def crossed(self, other: ShardSpec) -> ShardSpec:
        """Return the spec of a tensor split like this spec and, along other dims, like ``other``:
        experts over ``ep``, and the rows of each expert over ``etp``.

        Raises:
            ShardingError: If the specs are of different tensors, split the same dim or over the
                same axis, or both consist of several boxes, which no local tensor could stack.
        """
        problem = ""
        if self.global_shape != other.global_shape:
            problem = f"shapes are {self.global_shape} and {other.global_shape}"
        elif common_axes := set(self.sharded_over) & set(other.sharded_over):
            problem = f"both split over {', '.join(sorted(common_axes))}"
        elif dims := self._split_dims & other._split_dims:
            problem = f"both split dim {', '.join(map(str, sorted(dims)))}"
        elif len(self.boxes) > 1 < len(other.boxes):
            problem = f"they stack {len(self.boxes)} and {len(other.boxes)} boxes along two dims"
        if problem:
            raise ShardingError(
                f"two splits of a parameter of shape {self.global_shape} cannot be combined: "
                f"{problem}. Split one dim over one axis and another over a second."
            )
        boxes = (our_box.overlap(their_box) for our_box in self.boxes for their_box in other.boxes)
        return replace(
            self,
            boxes=tuple(box for box in boxes if box is not None),
            sharded_over=(*self.sharded_over, *other.sharded_over),
            partial_over=tuple(dict.fromkeys((*self.partial_over, *other.partial_over))),
            stacked_dim=(self if len(self.boxes) > 1 else other).stacked_dim,
        )

    @property
    def _split_dims(self) -> set[int]:
        """Dims with only a part on this rank."""
        return {
            dim
            for box in self.boxes
            for dim, (local_size, global_size) in enumerate(
                zip(box.shape, self.global_shape, strict=True)
            )
            if local_size != global_size
        }

    @property
    def is_expert(self) -> bool:
        """Whether the parameter is an expert's, with the axis ``ep`` or ``etp``."""
        return not {"ep", "etp"}.isdisjoint((*self.sharded_over, *self.partial_over))

    @property
    def data_axes(self) -> str:
        """Name of the group of ranks with the same values and different data, for reducing the
        gradient.
        """
        return "edp" if self.is_expert else "dp-cp"

    @property
    def model_axes(self) -> str:
        """Name of the group of ranks that together hold all parameters of this kind."""
        return "etp-ep-pp" if self.is_expert else "tp-pp"

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes inside a layer of a model replica with the same values on all ranks."""
        return tuple(
            axis
            for axis in self.model_axes.split("-")
            if axis != "pp" and axis not in self.sharded_over
        )

    @property
    def local_shape(self) -> Shape:
        """Shape of this rank's tensor."""
        if len(self.boxes) < 2:
            return self.boxes[0].shape if self.boxes else (0,) * len(self.global_shape)
        shape, dim = self.boxes[0].shape, self.stacked_dim
        return (*shape[:dim], sum(box.shape[dim] for box in self.boxes), *shape[dim + 1 :])

    def part(self, local: Box) -> ShardSpec:
        """Return the spec of a range of the local tensor, for example of rows."""
        return replace(self, boxes=tuple(box for box, _ in self._global_boxes(local)))

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's local tensor (newly allocated) of the global tensor."""
        if isinstance(full, StoredWeight):
            for box in self.boxes:
                full.check_columns(box.offset[-1], box.shape[-1])
        local = full.new_empty(self.local_shape)
        for offset, data in self.shards(local):
            data.copy_(full[Box(offset, tuple(data.shape)).slices])
        return local

    def shards(self, local: Tensor) -> list[Shard]:
        """Return the shards of a tensor of the local shape, as views."""
        return [Shard(box.offset, local[place.slices]) for box, place in self._placed()]

    def flat_shards(self, flat: Tensor, start: int) -> list[Shard]:
        """Return the shards of a flat range of the local tensor, the form in sharded optimizers.

        Args:
            flat: 1-D tensor: elements [start, start + len) of the flattened (row-major) local
                tensor.
            start: Index of the first element of ``flat``.

        Returns:
            Views of ``flat``. At most 2(n-1)+1 for each box of an n-dim tensor.
        """
        shards = []
        for part, position in _boxes_of_range(self.local_shape, start, start + flat.numel()):
            view = flat[position : position + prod(part.shape)].view(part.shape)
            for box, place in self._global_boxes(part):
                shards.append(Shard(box.offset, view[place.relative_to(part.offset).slices]))
        return shards

    def _placed(self) -> Iterator[tuple[Box, Box]]:
        """Yield every box of the global tensor, and the box's place in the local tensor."""
        start = 0
        for box in self.boxes:
            offset = tuple(start if dim == self.stacked_dim else 0 for dim in range(len(box.shape)))
            yield box, Box(offset, box.shape)
            start += box.shape[self.stacked_dim] if box.shape else 0

    def _global_boxes(self, local: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the boxes of the global tensor behind a box of the local tensor, and the place of
        each in the local tensor.
        """
        for box, place in self._placed():
            common = place.overlap(local)
            if common is not None:
                yield common.relative_to(place.offset).shifted(box.offset), common


def is_writer(spec: ShardSpec, context: ParallelContext) -> bool:
    """Return whether this rank's data-parallel group writes the group's shards of a parameter, and
    counts the shards in norms.

    Among the groups with the same values, the first on every axis of replication writes. A tied
    copy is left to the owner.
    """
    return spec.tied_to is None and all(
        context.axis(axis).rank == 0 for axis in {*spec.replica_axes, *spec.partial_over}
    )


def shard_range(total: int, size: int, rank: int) -> tuple[int, int]:
    """Return (start, length) of rank ``rank``'s share of ``total`` entries, in equal parts rounded
    up. The last parts are shorter.
    """
    part = -(-total // size)
    start = min(rank * part, total)
    return start, min(part, total - start)


def _boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Tile the flat range [start, stop) of a row-major tensor with boxes: (box, position in the
    range).
    """
    position = 0
    while start < stop:
        # The largest box that begins at `start`: full trailing dims, then as many of the next dim
        # as fit.
        index, remainder = [], start
        for n in reversed(shape):
            index.append(remainder % n)
            remainder //= n
        index.reverse()
        inner, dim = 1, len(shape)
        # Extend over whole trailing dims while the range begins at their start and covers them.
        while (
            dim > 0
            and all(i == 0 for i in index[dim - 1 :])
            and inner * shape[dim - 1] <= stop - start
        ):
            dim -= 1
            inner *= shape[dim]
        if dim == 0:
            extent: Shape = shape
        else:
            count = min(shape[dim - 1] - index[dim - 1], (stop - start) // inner)
            extent = (*(1,) * (dim - 1), count, *shape[dim:])
        yield Box(tuple(index), extent), position
        start += prod(extent)
        position += prod(extent)
