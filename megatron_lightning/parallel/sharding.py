"""What part of each parameter a rank holds, and the table that says how a plain model is split.

A parameter is a plain local ``nn.Parameter``. Its :class:`ShardSpec` says which rectangles of the global tensor the local
one consists of, over which axes it is sharded, and over which axes its gradient is a partial sum. A module declares the
specs of its own parameters in its attribute ``shard_specs`` (a dict by local name, a plain value that survives copying);
a parameter without one is replicated. Gradient reduction, gradient norm, initialisation and checkpoints read the spec;
nothing else guesses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.grid import GridName

if TYPE_CHECKING:
    from megatron_lightning.parallel.context import ParallelContext

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rectangle:
    """An axis-aligned box that a local and a global tensor have in common."""

    global_offset: Shape
    """First index in the global tensor."""
    local_offset: Shape
    """First index in the local tensor."""
    shape: Shape
    """Extent, the same in both."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the view of the local tensor that this box covers."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.shape, strict=True))]


@dataclass(frozen=True)
class ShardSpec:
    """How the local part of one parameter relates to the global tensor."""

    global_shape: Shape
    """Shape of the whole parameter, as one process would hold it."""
    rectangles: tuple[Rectangle, ...]
    """What this rank holds; together they tile the local tensor."""
    sharded_over: tuple[str, ...] = ()
    """Axes whose ranks hold different parts."""
    partial_over: tuple[str, ...] = ()
    """Axes whose ranks hold equal values but compute partial gradients, which must be summed."""
    grid: GridName = "dense"
    """Which of the two rank grids the axes belong to."""
    tied_to: str | None = None
    """Global name of the parameter that this one is a copy of (tied embeddings); None: it is the owner."""

    @classmethod
    def replicated(cls, shape: Sequence[int], *, partial_over: tuple[str, ...] = ()) -> ShardSpec:
        """Return the spec of a parameter that every rank holds whole."""
        whole = tuple(shape)
        zero = (0,) * len(whole)
        return cls(whole, (Rectangle(zero, zero, whole),), partial_over=partial_over)

    @classmethod
    def split(
        cls, shape: Sequence[int], *, dim: int, size: int, rank: int, axis: str = "tp", blocks: int = 1, grid: GridName = "dense"
    ) -> ShardSpec:
        """Return the spec of rank ``rank``'s part of a tensor cut along ``dim`` over ``size`` ranks.

        Args:
            shape: Global shape.
            dim: The dim that is cut.
            size: Ranks on the axis.
            rank: This rank's coordinate on the axis.
            axis: Name of the axis.
            blocks: Equal blocks stacked along ``dim`` that are each cut (2 for a fused gate and up projection).
            grid: Which grid the axis belongs to.

        Raises:
            ShardingError: If a block cannot be cut evenly.
        """
        whole = tuple(shape)
        if whole[dim] % (blocks * size):
            raise ShardingError(
                f"dim {dim} of shape {whole} has {whole[dim]} entries, which {blocks} block(s) x {size} {axis} ranks do not "
                f"divide. Choose a multiple of {blocks * size}."
            )
        block, part = whole[dim] // blocks, whole[dim] // blocks // size
        extent = (*whole[:dim], part, *whole[dim + 1 :])
        at = lambda offset: (*(0,) * dim, offset, *(0,) * (len(whole) - dim - 1))  # noqa: E731
        rectangles = tuple(Rectangle(at(b * block + rank * part), at(b * part), extent) for b in range(blocks))
        return cls(whole, rectangles, sharded_over=(axis,) if size > 1 else (), grid=grid)

    @property
    def local_shape(self) -> Shape:
        """Shape of this rank's tensor."""
        ends = [[o + n for o, n in zip(r.local_offset, r.shape, strict=True)] for r in self.rectangles]
        return tuple(max(dims) for dims in zip(*ends, strict=True)) if ends else (0,) * len(self.global_shape)

    def shard(self, full: Tensor) -> Tensor:
        """Cut this rank's part out of the global tensor (a new tensor)."""
        local = full.new_empty(self.local_shape)
        for box in self.rectangles:
            box.local(local).copy_(full[tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.shape, strict=True))])
        return local

    def pieces(self, local: Tensor) -> list[tuple[Shape, Tensor]]:
        """Return (global offset, view of ``local``) for every rectangle; ``local`` has the parameter's local shape."""
        return [(box.global_offset, box.local(local)) for box in self.rectangles]

    def flat_pieces(self, flat: Tensor, start: int) -> list[tuple[Shape, Tensor]]:
        """Return the pieces of a flat range of the local tensor, as sharded optimizers keep it.

        Args:
            flat: 1-D tensor: elements [start, start + len) of the flattened (row-major) local tensor.
            start: Index of its first element.

        Returns:
            (global offset, view of ``flat`` with the shape of that box); at most 2(n-1)+1 boxes per rectangle of an
            n-dim tensor.
        """
        pieces = []
        for offset, shape, position in _boxes_of_range(self.local_shape, start, start + flat.numel()):
            for box in self.rectangles:
                low = tuple(max(o, p) for o, p in zip(offset, box.local_offset, strict=True))
                high = tuple(
                    min(o + n, p + m) for o, n, p, m in zip(offset, shape, box.local_offset, box.shape, strict=True)
                )
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                view = flat[position : position + _numel(shape)].view(shape)
                view = view[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
                at = tuple(g + a - p for g, a, p in zip(box.global_offset, low, box.local_offset, strict=True))
                pieces.append((at, view))
        return pieces


def _numel(shape: Shape) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Tile the flat range [start, stop) of a row-major tensor with boxes: (offset, shape, position in the range)."""
    position = 0
    while start < stop:
        # The largest box that begins at `start`: whole trailing dims, then as many of the next dim as fit.
        index, rest = [], start
        for n in reversed(shape):
            index.append(rest % n)
            rest //= n
        index.reverse()
        inner, dim = 1, len(shape)
        while dim > 0 and all(i == 0 for i in index[dim - 1 :]) and inner * shape[dim - 1] <= stop - start:
            dim -= 1
            inner *= shape[dim]
        if dim == 0:
            extent: Shape = shape
        else:
            count = min(shape[dim - 1] - index[dim - 1], (stop - start) // inner)
            extent = (*(1,) * (dim - 1), count, *shape[dim:])
        yield tuple(index), extent, position
        start += _numel(extent)
        position += _numel(extent)


def named_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the spec of every parameter, by the name ``model.named_parameters()`` gives it.

    A module whose parameters tie to others (see :meth:`ShardSpec.tied_to`) states them in ``tied_parameters()``:
    a dict from its own parameter path to the owner's path, both relative to that module. It is read here, so that a rank
    which holds only the copy knows the owner's name.

    Raises:
        ShardingError: If a declared spec does not fit the local tensor.
    """
    specs: dict[str, ShardSpec] = {}
    ties: dict[str, str] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if hasattr(module, "tied_parameters"):
            ties.update({prefix + copy: prefix + owner for copy, owner in module.tied_parameters().items()})
        declared: Mapping[str, ShardSpec] = getattr(module, "shard_specs", None) or {}
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # the same tensor under a second name: named_parameters() lists it once, too
                continue
            seen.add(id(parameter))
            spec = declared.get(name) or ShardSpec.replicated(parameter.shape)
            if tuple(parameter.shape) != spec.local_shape:
                raise ShardingError(
                    f"{prefix}{name} has shape {tuple(parameter.shape)}, and its shard spec says {spec.local_shape} "
                    f"of {spec.global_shape}."
                )
            specs[prefix + name] = spec
    return {
        name: replace(spec, tied_to=ties[name]) if name in ties and ties[name] not in specs else spec
        for name, spec in specs.items()
    }


class Style(Protocol):
    """What is done to one module of a plain model. The concrete styles live in ``layers.styles``."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the module that takes the place of ``module`` (which may be ``module`` itself, changed)."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How a plain model is split over the tensor-parallel ranks, as a table.

    Patterns are dotted module paths in which ``*`` stands for one path segment, ``**`` for any number; the first pattern that matches wins.
    """

    modules: Mapping[str, Style]
    """Module path pattern -> style."""
    sequence_dim: int = 0
    """Dim of the sequence in the activations between the model's modules (1 for batch-first models)."""
    attributes: Mapping[str, Callable[[int, ParallelContext], int]] = field(default_factory=dict)
    """Attribute path pattern -> function of (value, context) for sizes that become local, such as a head count."""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Turn a dotted pattern into a regular expression."""
    escaped = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
    return re.compile(escaped)


def parallelize(model: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
    """Replace the modules that ``plan`` names by their parallel counterparts, in place.

    The table is read top-down: modules are swapped in the order of the model, parents before children, so that a style
    may look at its children as they were; then the named attributes are rewritten.

    Args:
        model: A plain model, on any device (``meta`` included), whole or already reduced to this rank's pipeline units.
        context: The groups of this rank.
        plan: The table.

    Returns:
        ``model``.

    Raises:
        ShardingError: If a size does not divide over the ranks, or the same module is reached under two names.
    """
    styles = [(compile_pattern(pattern), style) for pattern, style in plan.modules.items()]
    for path, module in list(model.named_modules()):
        style = next((style for pattern, style in styles if pattern.fullmatch(path)), None)
        if style is None:
            continue
        try:
            swapped = style.apply(module, context, plan)
        except ShardingError as error:
            raise ShardingError(f"{path}: {error}") from error
        if swapped is not module:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, swapped)
    rewrites = [(compile_pattern(pattern), rewrite) for pattern, rewrite in plan.attributes.items()]
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in list(vars(module).items()):
            rewrite = next((f for pattern, f in rewrites if pattern.fullmatch(prefix + name)), None)
            if rewrite is not None:
                setattr(module, name, rewrite(value, context))
    return model
