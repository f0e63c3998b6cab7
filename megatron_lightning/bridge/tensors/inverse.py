"""The way back: recipes of a folder's tensors from a model's parameters.

Filling a target on ``meta`` records strided views: boxes of the folder's tensors at places in the
target. Read backwards, the records describe each tensor of the folder in terms of parameters. Every
element of the folder is used exactly once, or an error names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.bridge.folders.folder import FolderTensors, Use
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy, spliced
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box, Shape


class Piece(NamedTuple):
    """A box of a folder's tensor, with the place of the box in a parameter."""

    box: Box
    """Range of the folder's tensor."""
    parameter: str
    """Name in the model."""
    inside: Box
    """Range of the parameter."""
    dims: tuple[int, ...]
    """Dim of the parameter -> dim of the folder's tensor. -1: of size 1."""


def inverse(
    folder: FolderTensors,
    parameters: Mapping[str, Lazy],
    ignored: Iterable[str] = (),
    tied: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[Piece]]:
    """Return the pieces of every tensor of a folder used by the model.

    Args:
        folder: The folder.
        parameters: Name in the model -> tensor made of the folder's.
        ignored: Patterns of names ignored by the model's declaration. Such tensors have no pieces,
            and are carried from folder to folder.
        tied: Further name of a parameter in the model -> first name. A folder may have the
            parameter under both names.

    Raises:
        CheckpointError: If an element of a tensor is used by no parameter, or by several, or on the
            way to a parameter new values are computed.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in folder.tensors}
    for name, lazy in parameters.items():
        # Reading a tensor records which box of which folder tensor went where. Turned around, the
        # records say how to make the folder's tensors again.
        for use in uses_of(folder, lazy):
            pieces[use.name] += _pieces(name, tuple(lazy.shape), use.box, use.view)
    for name in [
        name for name, pieces_of_tensor in pieces.items() if not pieces_of_tensor and name in tied
    ]:
        shape = tuple(folder.tensors[name].shape)
        if shape == tuple(parameters[tied[name]].shape):
            full_box = Box.full(shape)
            pieces[name] = [Piece(full_box, tied[name], full_box, tuple(range(len(shape))))]
    for name in [name for name, pieces_of_tensor in pieces.items() if not pieces_of_tensor]:
        if any(re.search(pattern, name) for pattern in ignored):
            del pieces[name]
    for name, pieces_of_tensor in pieces.items():
        shape = folder.tensors[name].shape
        # Equal size without overlaps: every element is covered once.
        count = sum(prod(piece.box.shape) for piece in pieces_of_tensor)
        if count != prod(shape) or _overlap(pieces_of_tensor):
            raise CheckpointError(
                f"{folder.path}: {name} of shape {list(shape)} has {prod(shape):,} elements, and "
                f"the model's parameters hold {count:,} of them, each once in a model that can be "
                "written back. Save the model with transformers instead."
            )
    return pieces


def uses_of(folder: FolderTensors, lazy: Lazy) -> list[Use]:
    """Return the boxes of a folder's tensors behind a lazy tensor.

    Raises:
        CheckpointError: If new values are computed on the way.
    """
    with folder.recording() as uses:
        lazy.fill(Box.full(lazy.shape), torch.empty(lazy.shape, device="meta"))
    return uses


def _overlap(pieces: list[Piece]) -> bool:
    return any(
        first.box.overlap(second.box) is not None
        for index, first in enumerate(pieces)
        for second in pieces[:index]
    )


def _pieces(name: str, shape: Shape, box: Box, view: Tensor) -> Iterator[Piece]:
    """Split a strided view of a parameter of ``shape`` into boxes of the parameter."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim_of = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    wide_dims = [dim for dim in range(view.ndim) if view.shape[dim] > 1]
    merged = next((dim for dim in wide_dims if view.stride(dim) not in dim_of), None)
    if merged is not None:  # a dim of the folder's tensor is two dims of the parameter: row by row
        for row in range(view.shape[merged]):
            inner = spliced(box, merged, 1, (box.offset[merged] + row, 1))
            yield from _pieces(name, shape, inner, view.narrow(merged, row, 1))
        return
    offset = tuple(
        view.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True)
    )
    order = {dim_of[view.stride(dim)]: dim for dim in wide_dims}
    extent = tuple(view.shape[order[dim]] if dim in order else 1 for dim in range(len(shape)))
    dims = tuple(order.get(dim, -1) for dim in range(len(shape)))
    yield Piece(box, name, Box(offset, extent), dims)


def assembled(
    folder: FolderTensors,
    pieces: Mapping[str, list[Piece]],
    parameters: Mapping[str, Fill],
    dtype: torch.dtype | None = None,
) -> dict[str, Lazy]:
    """Return the folder's tensors, made of a model's parameters.

    Args:
        folder: The folder of the tensors.
        pieces: See :func:`inverse`. A tensor without pieces keeps the folder's values.
        parameters: Name in the model -> function to fill boxes with values of the parameter.
        dtype: Dtype of floating tensors. None: the folder's.
    """
    tensors = {}
    for name, theirs in folder.tensors.items():
        dtype_of_tensor = (
            dtype if dtype is not None and theirs.dtype.is_floating_point else theirs.dtype
        )
        fill = theirs.fill
        if name in pieces:
            fill = _filled_by(pieces[name], parameters)
        tensors[name] = Lazy(theirs.shape, dtype_of_tensor, fill)
    return tensors


def _filled_by(pieces: list[Piece], parameters: Mapping[str, Fill]) -> Fill:
    def fill(box: Box, out: Tensor) -> None:
        for piece in pieces:
            common = piece.box.overlap(box)
            if common is not None:
                target = out[common.relative_to(box.offset).slices]
                parameters[piece.parameter](*_inside(piece, common, target))

    return fill


def _inside(piece: Piece, common: Box, target: Tensor) -> tuple[Box, Tensor]:
    """Return a box of the parameter, and the view of ``target`` to fill with the box."""
    moved = common.relative_to(piece.box.offset)
    offset, shape = [], []
    for start, dim in zip(piece.inside.offset, piece.dims, strict=True):
        offset.append(start + (moved.offset[dim] if dim >= 0 else 0))
        shape.append(moved.shape[dim] if dim >= 0 else 1)
    wide_dims = [dim for dim in piece.dims if dim >= 0]
    order = (*wide_dims, *(dim for dim in range(target.ndim) if dim not in wide_dims))
    return Box(tuple(offset), tuple(shape)), target.permute(order).view(shape)
