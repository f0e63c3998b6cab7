"""Find buffers written since the last look, without reading values.

A write in place raises a tensor's version counter, and an assignment makes another tensor. Two
writes do neither. The first are writes through ``.data``. The second are the running statistics of
BatchNorm: the kernel updates ``running_mean`` and ``running_var`` without a trace, beside a counter
``num_batches_tracked`` written in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

_COUNTER = "num_batches_tracked"


class BufferPlaces:
    """Places of the buffers in a module. Found once, since a walk over a large model costs
    milliseconds.

    Args:
        module: The module.
        accept: Whether a buffer's name belongs to these.
    """

    def __init__(self, module: nn.Module, accept: Callable[[str], bool]) -> None:
        self._places = {
            name: (owner, key)
            for path, owner in module.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and accept(name := f"{path}.{key}".lstrip("."))
        }

    def current(self) -> dict[str, Tensor | None]:
        """Return the buffers by name. None: not set any more."""
        return {name: owner._buffers.get(key) for name, (owner, key) in self._places.items()}


class _Seen(NamedTuple):
    """A buffer at the last look."""

    buffer: weakref.ref[Tensor]
    version: int
    shape: torch.Size
    dtype: torch.dtype


class BufferWatch:
    """Buffers written between two calls of :meth:`written`."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def written(self, buffers: Mapping[str, Tensor | None]) -> dict[str, bool]:
        """Return the names of the buffers written since the last call, and whether each buffer has
        another shape or dtype. The first call only looks.
        """
        names: dict[str, bool] = {}
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            look_before, look_now = self._seen.get(name), _look(buffer)
            if look_before is not None and (
                look_before.buffer() is not buffer or look_before.version != look_now.version
            ):
                names[name] = look_before[2:] != look_now[2:]
            self._seen[name] = look_now
        for counter in [name for name in names if name.rpartition(".")[2] == _COUNTER]:
            norm = counter.rpartition(".")[0]
            beside = [name for name in buffers if name.rpartition(".")[0] == norm]
            names = {**dict.fromkeys(beside, False), **names}
        return names


def _look(buffer: Tensor) -> _Seen:
    version = 0 if buffer.is_inference() else buffer._version
    return _Seen(weakref.ref(buffer), version, buffer.shape, buffer.dtype)
