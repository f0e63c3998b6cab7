"""Keep the meaning of indices in lists of modules that are split over stages.

``Sequential`` and ``ModuleList`` count what they hold, so that ``layers[0]`` and ``layers[:2]``
would be other layers on every stage, for an optimizer's groups or for freezing, say. Once split
they count the modules of the full model.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from functools import lru_cache
from typing import Any

from torch import nn

from megatron_lightning.errors import PipelineError


class AbsentUnit(nn.Module):
    """Placeholder of a module that another pipeline rank holds: it has no parameters, and cannot be
    called.
    """

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise a PipelineError: this is no layer."""
        raise PipelineError(
            "a layer that is on another pipeline rank was called by its index. In the forward of a "
            "pipelined module iterate over its ModuleList or Sequential, which gives the layers of "
            "this stage."
        )


def keep_positions(container: nn.Module) -> None:
    """Keep the indices of a ``Sequential`` or ``ModuleList`` from which modules are about to be
    removed.

    Indices, slices and the length count all modules; in the place of an absent one is an
    :class:`AbsentUnit`, and slices are of what is there. Iteration gives what is there, for a
    forward that runs it. Copies are of the original class.
    """
    if isinstance(container, nn.Sequential | nn.ModuleList) and not isinstance(
        container, _Positions
    ):
        vars(container)["_positions"] = tuple(container._modules)
        kind: type = type(container)
        object.__setattr__(container, "__class__", _with_positions(kind))


class _Positions:
    """Index of a list of modules that is split."""

    _original: type[nn.Module]
    _positions: tuple[str, ...]
    _modules: dict[str, nn.Module]

    def __getitem__(self, index: Any) -> nn.Module:
        if not isinstance(index, slice):
            module = self._modules.get(self._positions[operator.index(index)])
            return AbsentUnit() if module is None else module
        there = OrderedDict(
            (name, self._modules[name]) for name in self._positions[index] if name in self._modules
        )
        return (
            nn.Sequential(there)
            if isinstance(self, nn.Sequential)
            else nn.ModuleList(there.values())
        )

    def __len__(self) -> int:
        return len(self._positions)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return _make, (self._original,), *state


def _make(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@lru_cache
def _with_positions(kind: type) -> type:
    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_original": kind,
    }
    return type(kind.__name__, (_Positions, kind), attributes)
