"""Tensors whose values are still in files.

A :class:`Lazy` tensor has a shape, a dtype, and a function to fill any box of the tensor. Moves of
elements (stack, cat, split, transpose, reshape) are recorded as moves of boxes. Loading code of
``transformers``, or a family's rules in plain torch, runs on lazy tensors unchanged and reads
nothing. A box of the result is filled later from the byte ranges behind the box.

Three rules for all operations other than moves:

* An operation in place on a lazy tensor is ignored: initial values, and arithmetic on initial
  values (``trunc_normal_``, and ``_init_weights`` of several families), do not replace the values
  of a file. ``convert verify`` compares logits, and so detects a family whose loading code needs
  such an operation.
* ``*_like`` returns a real tensor.
* Other operations (dequantization) are computed from full tensors, if and when somebody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box

Fill = Callable[[Box, Tensor], None]
"""Writes the values of a box into a tensor of the box's shape, of any strides and dtype."""

aten: Any = torch.ops.aten


class NoValuesError(CheckpointError):
    """A tensor is known by shape and dtype only."""


class Lazy(Tensor):
    """A tensor without values, with a function to fill boxes of the tensor.

    Args:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        fill: Writes the values of a box.
    """

    fill: Fill

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> Lazy:
        """Return a tensor on the CPU without memory."""
        device = torch.device("cpu")
        tensor: Lazy = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        tensor.fill = fill
        return tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> None:
        """See the class."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Lazy({tuple(self.shape)}, {self.dtype})"

    def read(self, box: Box | None = None) -> Tensor:
        """Return the values of a box. None: all."""
        # Entering the CPU's mode slows every call of torch: only while models are made on meta.
        on_cpu = torch.get_default_device().type == "cpu"
        with nullcontext() if on_cpu else torch.device("cpu"):
            values = torch.empty(self.shape if box is None else box.shape, dtype=self.dtype)
            self.fill(box or Box.full(self.shape), values)
        return values

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        move = _MOVES.get(func)
        return (partial(_computed, func) if move is None else move)(*args, **(kwargs or {}))


def _computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operation other than a move. See the module's docstring."""
    if func._schema.is_mutable:
        target = kwargs.get("out", args[0])
        if isinstance(target, Tensor) and not isinstance(target, Lazy):
            values, options = tree_map_only(Lazy, Lazy.read, (args, kwargs))
            return func(*values, **options)
        return target
    if func._schema.name.endswith("_like"):
        return func(*tree_map_only(Lazy, _empty_on("cpu"), args), **kwargs)

    def fill(index: int, box: Box, out: Tensor) -> None:
        if out.is_meta:
            raise CheckpointError(
                f"{func} computes new values on the way from the folder's tensors to a parameter, "
                "so no way back is known. Export to a folder in another format instead."
            )
        values, options = tree_map_only(Lazy, Lazy.read, (args, kwargs))
        out.copy_(tree_leaves(func(*values, **options))[index][box.slices])

    values, options = tree_map_only(Tensor, _empty_on("meta"), (args, kwargs))
    likes, structure = tree_flatten(func(*values, **options))
    results = [Lazy(x.shape, x.dtype, partial(fill, index)) for index, x in enumerate(likes)]
    return tree_unflatten(results, structure)


def _empty_on(device: str) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.empty(x.shape, dtype=x.dtype, device=device)


# ------------------------------------------------------------------------------------------- boxes


def spliced(box: Box, dim: int, num_dropped: int, *ranges: tuple[int, int]) -> Box:
    """Return the box with ``ranges`` (start, length) in the place of dims from ``dim`` on."""
    starts = tuple(start for start, _ in ranges)
    lengths = tuple(length for _, length in ranges)
    end = dim + num_dropped
    return Box(
        (*box.offset[:dim], *starts, *box.offset[end:]),
        (*box.shape[:dim], *lengths, *box.shape[end:]),
    )


def _with_dims(x: Lazy, dim: int, num_dropped: int, sizes: Iterable[int], fill: Fill) -> Lazy:
    """Return a tensor like ``x`` with ``sizes`` in the place of dims from ``dim`` on."""
    return Lazy((*x.shape[:dim], *sizes, *x.shape[dim + num_dropped :]), x.dtype, fill)


# ------------------------------------------------------------------------------------------- moves


def _from_first(dim: int, num_dims: int) -> int:
    """Return a dim counted from the first.

    Raises:
        IndexError: If there is no such dim, as in torch.
    """
    if not -num_dims <= dim < num_dims:
        raise IndexError(f"dim {dim} is out of range for a tensor of {num_dims} dims")
    return dim % num_dims


def _same(x: Lazy, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Lazy:
    if dtype is None or dtype == x.dtype:
        return Lazy(x.shape, x.dtype, x.fill)
    return Lazy(x.shape, dtype, _Cast(x.fill, dtype))


@dataclass(frozen=True)
class _Cast:
    """A fill with rounding to a dtype. Two casts of the same fill are equal."""

    fill: Fill
    dtype: torch.dtype

    def __call__(self, box: Box, out: Tensor) -> None:
        if out.is_meta or out.dtype == self.dtype:  # a fill casts to the dtype of the target
            self.fill(box, out)
        else:
            rounded = torch.empty(box.shape, dtype=self.dtype)
            self.fill(box, rounded)
            out.copy_(rounded)


def _slice(
    x: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return _computed(aten.slice.Tensor, x, dim, start, end, step)
    dim = _from_first(dim, x.ndim)
    first, last, _ = slice(start, end).indices(x.shape[dim])

    def fill(box: Box, out: Tensor) -> None:
        x.fill(spliced(box, dim, 1, (box.offset[dim] + first, box.shape[dim])), out)

    return _with_dims(x, dim, 1, (max(0, last - first),), fill)


def _select(x: Lazy, dim: int, index: int) -> Lazy:
    dim = _from_first(dim, x.ndim)
    if not -x.shape[dim] <= index < x.shape[dim]:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {x.shape[dim]}")
    index %= x.shape[dim]

    def fill(box: Box, out: Tensor) -> None:
        x.fill(spliced(box, dim, 0, (index, 1)), out.unsqueeze(dim))

    return _with_dims(x, dim, 1, (), fill)


def _unsqueeze(x: Lazy, dim: int) -> Lazy:
    dim = _from_first(dim, x.ndim + 1)

    def fill(box: Box, out: Tensor) -> None:
        x.fill(spliced(box, dim, 1), out.squeeze(dim))

    return _with_dims(x, dim, 0, (1,), fill)


def _squeeze(x: Lazy, dim: int) -> Lazy:
    return _select(x, dim, 0) if x.shape[dim] == 1 else _same(x)


def _permute(x: Lazy, dims: Sequence[int]) -> Lazy:
    dims = [_from_first(dim, x.ndim) for dim in dims]
    back = sorted(range(len(dims)), key=dims.__getitem__)

    def fill(box: Box, out: Tensor) -> None:
        offset = tuple(box.offset[dim] for dim in back)
        x.fill(Box(offset, tuple(box.shape[dim] for dim in back)), out.permute(back))

    return Lazy([x.shape[dim] for dim in dims], x.dtype, fill)


def _transpose(x: Lazy, first: int = 0, second: int = 1) -> Lazy:
    if x.ndim < 2:
        return _same(x)
    dims = list(range(x.ndim))
    first, second = _from_first(first, x.ndim), _from_first(second, x.ndim)
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(x, dims)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(x, Lazy) for x in tensors):
        return _computed(aten.cat.default, tensors, dim)
    dim = _from_first(dim, tensors[0].ndim)
    _check_sizes(tensors, dim)
    starts = [sum(x.shape[dim] for x in tensors[:index]) for index in range(len(tensors))]

    def fill(box: Box, out: Tensor) -> None:
        begin, end = box.offset[dim], box.offset[dim] + box.shape[dim]
        for x, start in zip(tensors, starts, strict=True):
            low, high = max(start, begin), min(start + x.shape[dim], end)
            if high > low:
                target = out.narrow(dim, low - begin, high - low)
                x.fill(spliced(box, dim, 1, (low - start, high - low)), target)

    return _with_dims(tensors[0], dim, 1, (sum(x.shape[dim] for x in tensors),), fill)


def _check_sizes(tensors: Sequence[Lazy], dim: int) -> None:
    """Check that tensors differ along ``dim`` only, as torch does. A stack of experts without one
    would else be one of other experts.
    """
    others = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors}
    if len(others) > 1:
        shapes = ", ".join(str(list(shape)) for shape in sorted({tuple(x.shape) for x in tensors}))
        raise RuntimeError(f"tensors of shapes {shapes} cannot be joined along dim {dim}")


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(x, Lazy) for x in tensors):
        return _computed(aten.stack.default, tensors, dim)
    dim = _from_first(dim, tensors[0].ndim + 1)
    return _cat([_unsqueeze(x, dim) for x in tensors], dim)


def _split(x: Lazy, size: int, dim: int = 0) -> list[Any]:
    length = x.shape[dim]
    return [_slice(x, dim, start, min(start + size, length)) for start in range(0, length, size)]


def _split_with_sizes(x: Lazy, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    if sum(sizes) != x.shape[dim]:
        raise RuntimeError(f"{list(sizes)} does not add up to the {x.shape[dim]} of dim {dim}")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_slice(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _unbind(x: Lazy, dim: int = 0) -> list[Lazy]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _flatten(x: Lazy, dim: int) -> Lazy:
    """Merge dims ``dim`` and the next, of sizes (a, b).

    A range of the merged dim is at most the end of a row, full rows, and the start of a row.
    """
    num_rows, length = x.shape[dim : dim + 2]

    def fill(box: Box, out: Tensor) -> None:
        at, stop = box.offset[dim], box.offset[dim] + box.shape[dim]
        while at < stop:
            row, offset = divmod(at, length)
            rows = max(1, (stop - at) // length) if offset == 0 else 1
            width = min(length - offset, stop - at)
            target = out.narrow(dim, at - box.offset[dim], rows * width)
            ranges = ((row, rows), (offset, width))
            x.fill(spliced(box, dim, 1, *ranges), _split_dim(target, dim, (rows, width)))
            at += rows * width

    return _with_dims(x, dim, 2, (num_rows * length,), fill)


def _split_dim(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    return x.view(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _unflatten(x: Lazy, dim: int, num_rows: int) -> Lazy:
    """Split dim ``dim`` into (num_rows, the rest)."""
    length = x.shape[dim] // num_rows

    def fill(box: Box, out: Tensor) -> None:
        for row in range(box.shape[dim]):
            start = (box.offset[dim] + row) * length + box.offset[dim + 1]
            source = spliced(box, dim, 2, (start, box.shape[dim + 1]))
            x.fill(source, out.select(dim, row))

    return _with_dims(x, dim, 1, (num_rows, length), fill)


def _reshape(x: Lazy, shape: Sequence[int], *_: Any) -> Lazy:
    """From the left, split off a size of the target, or merge dims until the size can be
    split off.
    """
    sizes = torch.empty(x.shape, device="meta").reshape(tuple(shape)).shape
    if prod(sizes) == 0:
        return Lazy(sizes, x.dtype, lambda _, __: None)
    for index, size in enumerate(sizes):
        x = _unsqueeze(x, index) if index == x.ndim else x
        while x.shape[index] != size:
            divides = x.shape[index] % size == 0
            x = _unflatten(x, index, size) if divides else _flatten(x, index)
    while x.ndim > len(sizes):
        x = _select(x, -1, 0)
    return x


def _pad(x: Lazy, pad: Sequence[int], value: float = 0.0) -> Any:
    return _computed(aten.constant_pad_nd.default, x, pad, value) if any(pad) else _same(x)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare values row by row, such as values of a possibly tied head with the embedding.

    Without values, tensors of the same fill are equal.
    """
    if isinstance(first, Lazy) and isinstance(second, Lazy) and first.fill == second.fill:
        return True
    if first.shape != second.shape:
        return False
    rows = first.shape[0] if first.ndim else 1
    step = max(1, (64 << 20) // max(1, first.numel() * first.dtype.itemsize // max(1, rows)))
    for start in range(0, rows, step):
        box = Box.full(first.shape)
        if first.ndim:
            box = spliced(box, 0, 1, (start, min(step, rows - start)))
        try:
            a, b = (x.read(box) if isinstance(x, Lazy) else x[box.slices] for x in (first, second))
        except NoValuesError:
            return False
        if not torch.equal(a, b):
            return False
    return True


def _copy(target: Tensor, x: Any, *_: Any) -> Tensor:
    if isinstance(x, Lazy) and not isinstance(target, Lazy):
        if target.shape == x.shape:
            x.fill(Box.full(x.shape), target)
        else:
            target.copy_(x.read())
    return target


_MOVES: Mapping[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.constant_pad_nd.default: _pad,
    aten.copy_.default: _copy,
    aten.equal.default: _equal,
}
