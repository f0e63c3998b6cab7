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
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from megatron_lightning.compat import avoid_fused_inference
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
    fused_rows: tuple[int, ...] = ()
    """Rows of the logical matrices that are stacked, period after period, in dim 0 of the global tensor: (f, f) for gate and
    up, (n/g x d, d, d) for query, key and value of each group; (): it is one matrix."""

    @classmethod
    def replicated(cls, shape: Sequence[int], *, partial_over: tuple[str, ...] = ()) -> ShardSpec:
        """Return the spec of a parameter that every rank holds whole."""
        whole = tuple(shape)
        zero = (0,) * len(whole)
        return cls(whole, (Rectangle(zero, zero, whole),), partial_over=partial_over)

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
        grid: GridName = "dense",
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

        def at(offset: int) -> Shape:
            return (*(0,) * dim, offset, *(0,) * (len(whole) - dim - 1))

        rectangles = tuple(Rectangle(at(b * block + rank * part), at(b * part), extent) for b in range(blocks))
        return cls(whole, rectangles, sharded_over=(axis,) if size > 1 else (), grid=grid)

    @classmethod
    def split_rows(cls, shape: Sequence[int], *, size: int, rank: int, axis: str = "tp", grid: GridName = "dense") -> ShardSpec:
        """Return the spec of rank ``rank``'s rows of a table that need not divide evenly: see :func:`part_of`.

        Raises:
            ShardingError: If a rank would have no row.
        """
        whole, zeros = tuple(shape), (0,) * (len(shape) - 1)
        start, length = part_of(whole[0], size, rank)
        if part_of(whole[0], size, size - 1)[1] == 0:
            raise ShardingError(
                f"{whole[0]} rows are too few for {size} {axis} ranks: in equal parts rounded up, the last would have none. "
                f"Choose at least {size * (size - 1)} rows, or fewer ranks."
            )
        box = Rectangle((start, *zeros), (0, *zeros), (length, *whole[1:]))
        return cls(whole, (box,), sharded_over=(axis,) if size > 1 else (), grid=grid)

    @property
    def local_shape(self) -> Shape:
        """Shape of this rank's tensor."""
        ends = [[o + n for o, n in zip(r.local_offset, r.shape, strict=True)] for r in self.rectangles]
        return tuple(max(dims) for dims in zip(*ends, strict=True)) if ends else (0,) * len(self.global_shape)

    def rows(self, start: int, count: int) -> ShardSpec:
        """Return the spec of ``count`` rows (entries of dim 0) of the local tensor from row ``start`` on."""
        boxes = []
        for box in self.rectangles:
            first, top = box.local_offset[0], max(start, box.local_offset[0])
            length = min(start + count, first + box.shape[0]) - top
            if length > 0:
                offset = (box.global_offset[0] + top - first, *box.global_offset[1:])
                boxes.append(Rectangle(offset, (top - start, *box.local_offset[1:]), (length, *box.shape[1:])))
        return replace(self, rectangles=tuple(boxes))

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
                high = tuple(min(o + n, p + m) for o, n, p, m in zip(offset, shape, box.local_offset, box.shape, strict=True))
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                view = flat[position : position + prod(shape)].view(shape)
                view = view[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
                at = tuple(g + a - p for g, a, p in zip(box.global_offset, low, box.local_offset, strict=True))
                pieces.append((at, view))
        return pieces


def part_of(total: int, size: int, rank: int) -> tuple[int, int]:
    """Return (start, length) of rank ``rank``'s part of ``total`` entries in equal parts rounded up; the last are shorter."""
    part = -(-total // size)
    start = min(rank * part, total)
    return start, min(part, total - start)


def take_shards(module: nn.Module, source: nn.Module, specs: Mapping[str, ShardSpec]) -> None:
    """Give ``module`` its parts of the parameters of ``source`` that ``specs`` names, None for the others it may have.

    The parts are new tensors on the source's device, ``meta`` included; the specs become ``module.shard_specs``.
    """
    for name, parameter in source._parameters.items():
        if parameter is None or name not in specs:
            module.register_parameter(name, None)
        else:
            part = specs[name].shard(parameter.detach())
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module.shard_specs = dict(specs)  # type: ignore[assignment]
    if hasattr(source, "fused_rows"):
        module.fused_rows = source.fused_rows


_NOTED_TIES = "_megatron_ties"


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
        start += prod(extent)
        position += prod(extent)


def note_ties(model: nn.Module) -> None:
    """Note on ``model`` which of its parameters are one tensor under several names, for :func:`tied_names`.

    To be called while the model is whole: of two names that a cut sends to different ranks, neither shows the other.
    """
    declared = tied_names(model)
    found: dict[str, str] = {}
    for names in shared_names(model):
        owner = next((declared[name] for name in names if name in declared), names[0])
        found |= {name: owner for name in names if name != owner}
    model.__dict__[_NOTED_TIES] = found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return copy -> owner for every parameter of ``model`` that is tied to another.

    A module whose parameters tie to others may state them in ``tied_parameters()``: a dict from its own parameter path to the
    owner's path, both relative to that module, also where this rank holds only one of them. Those that a whole model shares
    are noted by :func:`note_ties`.
    """
    ties: dict[str, str] = dict(vars(model).get(_NOTED_TIES, {}))
    for path, module in model.named_modules():
        if hasattr(module, "tied_parameters"):
            prefix = f"{path}." if path else ""
            ties.update({prefix + copy: prefix + owner for copy, owner in module.tied_parameters().items()})
    return ties


def named_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the spec of every parameter, by the name ``model.named_parameters()`` gives it.

    A module whose ``weight`` consists of several matrices says so in its attribute ``fused_rows`` (:class:`ShardSpec`).

    Raises:
        ShardingError: If a declared spec does not fit the local tensor.
    """
    specs: dict[str, ShardSpec] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
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
            fused = getattr(module, "fused_rows", ()) if name == "weight" else ()
            specs[prefix + name] = replace(spec, fused_rows=tuple(fused)) if fused else spec
    ties = tied_names(model)
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

    Patterns are dotted module paths in which ``*`` stands for one path segment, ``**`` for any number; the first pattern
    that matches wins.
    """

    modules: Mapping[str, Style]
    """Module path pattern -> style."""
    sequence_dim: int = 0
    """Dim of the sequence in the activations between the model's modules (1 for batch-first models)."""
    attributes: Mapping[str, Callable[[int, ParallelContext], int]] = field(default_factory=dict)
    """Attribute path pattern -> function of (value, context) for sizes that become local, such as a head count."""

    def style_of(self, path: str) -> Style | None:
        """Return what is done to the module at ``path``; None: it stays as it is."""
        return next((style for pattern, style in self._styles if pattern.fullmatch(path)), None)

    @cached_property
    def _styles(self) -> list[tuple[re.Pattern[str], Style]]:
        return [(compile_pattern(pattern), style) for pattern, style in self.modules.items()]


def sharding_plans(module: nn.Module) -> dict[str, ShardingPlan]:
    """Return the tables of the modules in ``module`` that have a ``sharding_plan()``, by their paths."""
    found = ((path, getattr(child, "sharding_plan", None)) for path, child in module.named_modules())
    return {path: make_plan() for path, make_plan in found if callable(make_plan)}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Turn a dotted pattern into a regular expression; ``**norm`` and ``**.norm`` take a ``norm`` at the top as well."""
    escaped = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)?")
    return re.compile(re.sub(r"\\\*\\\*(?=.)", ".*", escaped).replace(r"\*\*", ".+").replace(r"\*", "[^.]+"))


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
    tied = shared_names(model)
    for path, module in list(model.named_modules()):
        style = plan.style_of(path)
        if style is None:
            continue
        try:
            swapped = style.apply(module, context, plan)
        except ShardingError as error:
            raise ShardingError(f"{path}: {error}") from error
        if swapped is not module:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, swapped)
    avoid_fused_inference(model)
    for owner, *copies in tied:
        _tie(model, owner, copies)
    rewrites = [(compile_pattern(pattern), rewrite) for pattern, rewrite in plan.attributes.items()]
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in list(vars(module).items()):
            rewrite = next((f for pattern, f in rewrites if pattern.fullmatch(prefix + name)), None)
            if rewrite is not None:
                setattr(module, name, rewrite(value, context))
    return model


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that the model holds under more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, owner: str, copies: Sequence[str]) -> None:
    """Make the modules that swapped a shared parameter for parts of it share the part."""
    parameter = model.get_parameter(owner)
    for copy in copies:
        if model.get_parameter(copy).shape != parameter.shape:
            raise ShardingError(
                f"{copy} and {owner} were one parameter, and the plan gives them the shapes "
                f"{tuple(model.get_parameter(copy).shape)} and {tuple(parameter.shape)}. Give both modules the same style."
            )
        parent, _, name = copy.rpartition(".")
        setattr(model.get_submodule(parent), name, parameter)
