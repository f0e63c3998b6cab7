"""Plain values that a step leaves on a module, in a form for sending to other ranks.

Tensors, numbers, strings and containers of plain values are sent. An object of another class is
not, since unpickling would run the class's code.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_FACTORIES = (None, int, float, bool, str, list, dict, set)
_EXACT = 2**53
"""Largest integer up to which float64, the dtype of sent numbers, holds every integer."""


class _Sent(NamedTuple):
    """Tensor in transit to other ranks."""

    tensor: Tensor
    place: str
    """``device``: the rank's device. ``cpu``. Or ``numpy``: an array."""


class _Whole:
    """Value sent unchanged: an integer that float64 cannot hold."""

    def __init__(self, value: Any) -> None:
        self.value = value


def is_atom(value: Any) -> bool:
    """Return whether ``value`` is an immutable value without parts."""
    return isinstance(value, _ATOMS)


def is_plain(value: Any) -> bool:
    """Return whether ``value`` can be sent: atoms, dense tensors, arrays, and containers of plain
    values.
    """
    if is_atom(value):
        return True
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not value.is_quantized and not value.is_meta
        return type(value) in (Tensor, torch.nn.Parameter) and is_dense
    if isinstance(value, np.ndarray):
        return type(value) is np.ndarray and not value.dtype.hasobject
    kind = type(value)
    if kind in _SEQUENCES:
        return all(map(is_plain, value))
    if kind is defaultdict and value.default_factory not in _FACTORIES:
        return False
    return kind in _MAPPINGS and all(map(is_plain, value)) and all(map(is_plain, value.values()))


def equal_atoms(first: Any, second: Any) -> bool:
    """Return whether two atoms are the same value. NaN equals NaN."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    both_nan = isinstance(first, float) and math.isnan(first) and math.isnan(second)
    return both_nan or bool(first == second)


def packed(value: Any) -> Any:
    """Return a plain value with detached tensors, marked with the tensors' places."""
    return tree_map(_pack, value)


def _pack(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # Numbers travel as real numbers.
        row = leaf.detach().reshape(-1, 1) if leaf.is_complex() and not leaf.ndim else leaf
        return _Sent(row.detach(), "cpu" if leaf.device.type == "cpu" else "device")
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return _Sent(torch.from_numpy(np.array(leaf, order="C", ndmin=1)), f"numpy{leaf.ndim}")
    if isinstance(leaf, int) and abs(leaf) > _EXACT:
        return _Whole(leaf)
    return leaf


def unpacked(value: Any, device: torch.device) -> Any:
    """Return the value given to :func:`packed`, with tensors of this rank's own."""

    def restored(leaf: Any) -> Any:
        if isinstance(leaf, _Whole):
            return leaf.value
        if not isinstance(leaf, _Sent):
            return leaf
        if leaf.place.startswith("numpy"):
            array = leaf.tensor.cpu().numpy()
            return array.copy() if int(leaf.place[5:]) else array.reshape(()).copy()
        # A received number is a view of the tensor of all numbers.
        tensor = leaf.tensor.to("cpu" if leaf.place == "cpu" else device, copy=True)
        return tensor.reshape(()) if tensor.is_complex() and tensor.shape == (1, 1) else tensor

    return tree_map(restored, value, is_leaf=lambda leaf: isinstance(leaf, _Sent))
