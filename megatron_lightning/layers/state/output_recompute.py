"""Recompute outputs of cheap modules in backward, instead of saving them for another layer.

A norm or an activation function costs little, and the next layer saves the output as its input. A
recipe replaces the output in the tensors saved by the parent's forward. The recipe holds the
module's forward and inputs, and the inputs are saved in any case. Parameters, names and the graph
stay unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lightning.compat import saved_tensors_hooks_in_force
from megatron_lightning.errors import RecomputeError
from megatron_lightning.layers.wrapped_methods import Forward, replace_attribute, wrap


def drop_output(module: nn.Module, path: str) -> None:
    """Save a recipe instead of the output of the submodule ``path`` in the parent's forward."""
    parent = module.get_submodule(path.rpartition(".")[0])
    dropping: _Dropping | None = parent.__dict__.get("_dropped_outputs")
    if dropping is None:
        dropping = _Dropping()
        replace_attribute(parent, "_dropped_outputs", dropping)
        wrap(parent, "forward", dropping.around)
    wrap(module.get_submodule(path), "forward", dropping.computed)


@dataclass(frozen=True)
class _Packed:
    """A tensor, packed by the surrounding hooks if there are any."""

    value: Any
    unpack: Callable[[Any], Tensor] | None

    def tensor(self) -> Tensor:
        tensor: Tensor = self.value if self.unpack is None else self.unpack(self.value)
        return tensor


@dataclass(frozen=True)
class _Recipe:
    """Represents a dropped output in the graph."""

    forward: Forward
    inputs: tuple[_Packed, ...]
    versions: tuple[tuple[Tensor, int], ...]
    """Inputs saved without hooks, and their versions."""
    autocast: tuple[str, bool, torch.dtype]
    view: tuple[Sequence[int], Sequence[int], int] | None = None
    """Size, stride and offset of the saved view of the output."""

    def tensor(self) -> Tensor:
        if any(value._version != version for value, version in self.versions):
            raise RecomputeError(
                "the input of a module whose output is recomputed was changed in place. Change a "
                "copy of it, or remove the module from recompute_modules."
            )
        device, enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled):
            output: Tensor = self.forward(*(packed.tensor() for packed in self.inputs))
        return output if self.view is None else output.as_strided(*self.view)


class _DroppedOutputs:
    """Recipes of the live outputs in one forward of the modules' parent, by memory location.

    Surrounding hooks, such as hooks of an offloaded parent, get all other tensors.
    """

    def __init__(self) -> None:
        self._recipes: dict[tuple[Any, ...], _Recipe] = {}
        self._outer = saved_tensors_hooks_in_force()

    def record(self, output: Tensor, forward: Forward, inputs: Sequence[Tensor]) -> None:
        """Record the recipe of ``output`` for the lifetime of ``output``."""
        # A view of a larger tensor, possibly saved by another layer.
        if output.untyped_storage().nbytes() != output.nbytes:
            return
        device, place = output.device.type, _place(output)
        values = [value.detach() for value in inputs]
        self._recipes[place] = _Recipe(
            forward,
            tuple(map(self._keep, values)),
            () if self._outer else tuple((value, value._version) for value in values),
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )
        # The memory may be reused afterwards.
        weakref.finalize(output, self._recipes.pop, place, None)

    def pack(self, tensor: Tensor) -> _Packed | _Recipe:
        """Return the recipe of a dropped output, or of a view of a dropped output.

        Surrounding hooks pack any other tensor.
        """
        recipe = self._recipes.get(_place(tensor))
        if recipe is None:
            return self._keep(tensor)
        return replace(recipe, view=(tensor.shape, tensor.stride(), int(tensor.storage_offset())))

    def _keep(self, tensor: Tensor) -> _Packed:
        return (
            _Packed(tensor, None)
            if self._outer is None
            else _Packed(self._outer[0](tensor), self._outer[1])
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor._version


class _Dropping:
    """Wrappers that drop outputs inside one module.

    Copies of the module start without the state of a running forward.
    """

    def __init__(self) -> None:
        self._running: list[_DroppedOutputs] = []

    def __reduce__(self) -> tuple[type[_Dropping], tuple[()]]:
        return _Dropping, ()

    def around(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run the parent's forward."""
        # The compiler chooses the saved tensors.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        outputs = _DroppedOutputs()
        self._running.append(outputs)
        try:
            with saved_tensors_hooks(outputs.pack, lambda packed: packed.tensor()):
                return forward(*args, **kwargs)
        finally:
            self._running.pop()

    def computed(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward and record the output."""
        output = forward(*args, **kwargs)
        if (
            self._running
            and not kwargs
            and torch.is_grad_enabled()
            and all(isinstance(value, Tensor) for value in args)
        ):
            self._running[-1].record(output, forward, args)
        return output
