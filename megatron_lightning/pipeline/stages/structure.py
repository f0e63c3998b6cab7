"""Structure of a module's output, as plain data for sending to another stage.

A unit returns a tensor, or tensors in nested containers with plain values beside. A stage without
the unit rebuilds the unit's output from the structure and the received tensors. Nothing is pickled:
a structure travels as JSON.

The file also holds two neighbors of structures: stubs of units that do not run on a stage, and
containers changed by a unit, a side channel beside the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.stages.fields import closed, opened

_PLAIN = (type(None), bool, int, float, str)


class Like(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Structure(NamedTuple):
    """Containers and leaves of an output."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """:class:`Like` for a tensor, else the plain value itself."""

    @property
    def num_tensors(self) -> int:
        """Return how many tensors the output holds."""
        return sum(isinstance(leaf, Like) for leaf in self.leaves)

    def build(self, tensors: Iterator[Tensor]) -> Any:
        """Return an output of this structure, filled with the next of ``tensors``."""
        leaves = [next(tensors) if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        return closed(pytree.tree_unflatten(leaves, self.spec))


def flatten(output: Any, name: str) -> tuple[tuple[Tensor, ...], Structure]:
    """Return the tensors and the structure of the output of unit ``name``.

    Raises:
        PipelineError: If the output holds a value that cannot travel.
    """
    leaves, spec = pytree.tree_flatten(opened(output))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise PipelineError(
                f"pipeline unit {name!r} returns a {type(leaf).__name__}, and only tensors, plain "
                "values and containers of them travel between stages: lists, dicts, and tuples and "
                "dataclasses that a module defines. Return those (a model of transformers: set "
                "use_cache=False)."
            )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    described = tuple(
        Like(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )
    return tensors, Structure(spec, described)


def dump(structures: Mapping[int, Structure], name_of: Callable[[int], str]) -> str:
    """Return the structures of the outputs of units as JSON. ``name_of``: returns a unit's path.

    Raises:
        PipelineError: If a container's type is not known by name.
    """
    entries = {}
    for index, (spec, leaves) in structures.items():
        try:
            text = pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError) as error:
            raise PipelineError(
                f"pipeline unit {name_of(index)!r} returns a {_name(spec)}, a type that other "
                "stages cannot build. Return a tensor, or tensors in tuples, lists, dicts, or in "
                "named tuples and dataclasses that are defined at the top of a module."
            ) from error
        entries[index] = [text, *map(_dump_leaf, leaves)]
    return json.dumps(entries)


def _name(spec: pytree.TreeSpec) -> str:
    kind = spec.context if isinstance(spec.context, type) else spec.type
    return str(kind.__name__)


def load(text: str) -> dict[int, Structure]:
    """Return the structures written by :func:`dump`."""
    return {
        int(index): Structure(pytree.treespec_loads(spec), tuple(map(_load_leaf, leaves)))
        for index, (spec, *leaves) in json.loads(text).items()
    }


def _dump_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Like):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return leaf


def _load_leaf(leaf: Any) -> Any:
    return Like(tuple(leaf[1]), getattr(torch, leaf[0])) if isinstance(leaf, list) else leaf


_NOT_ON_STUBS = ("torch.distributed.fsdp", "megatron_lightning")
_LIBRARIES = ("torch", "megatron_lightning", "transformers", "lightning")


class Placeholders:
    """Memory of the shapes of outputs that were not sent. Code may write into the memory.

    Args:
        value: Of floating-point tensors. Other tensors are zero.
        device: Device of the tensors.
    """

    def __init__(self, value: float, device: torch.device) -> None:
        self._value = value
        self._device = device
        self._known: dict[Like, Tensor] = {}

    def of(self, like: Like, *, fresh: bool = False) -> Tensor:
        """Return a tensor. ``fresh``: in new storage. Otherwise several outputs may share the
        tensor until code writes into the tensor.
        """
        known_placeholder = None if fresh else self._known.get(like)
        if (
            known_placeholder is None
            or known_placeholder.requires_grad
            or num_writes(known_placeholder)
        ):
            value = self._value if like.dtype.is_floating_point else 0
            known_placeholder = torch.full(like.shape, value, dtype=like.dtype, device=self._device)
            self._known[like] = known_placeholder
        return known_placeholder


def num_writes(tensor: Tensor) -> int:
    """Return the number of writes into a tensor, as far as torch counts writes."""
    return 0 if tensor.is_inference() else tensor._version


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the user's forward hooks of a module."""
    hooks = module._forward_hooks.values()
    return [hook for hook in hooks if _module_of(hook).partition(".")[0] not in _LIBRARIES]


def hooks_inside(
    module: nn.Module, units: Iterable[str], preludes: Sequence[str] = ()
) -> list[str]:
    """Return preludes, and modules inside of preludes and units, with forward hooks that run on the
    stage of the module only.
    """
    return [
        f"{unit}.{path}" if path else unit
        for unit in (*preludes, *units)
        for path, child in module.get_submodule(unit).named_modules()
        if (path or unit in preludes) and user_hooks(child)
    ]


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", None) or "")


def show_to_hooks(
    unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Run the user's forward hooks of a unit that does not run, since hooks may record outputs.

    The stage of the unit has run the hooks too, and ``output`` already holds the changes by hooks.
    What the hooks return here is dropped.
    """
    for key, hook in unit._forward_hooks.items():
        if _module_of(hook).startswith(_NOT_ON_STUBS):
            continue
        with_kwargs = key in unit._forward_hooks_with_kwargs
        if with_kwargs:
            hook(unit, args, kwargs, output)
        else:
            hook(unit, args, output)


def sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the lists and dicts among the arguments of a call."""
    return [len(x) for x in (*args, *kwargs.values()) if isinstance(x, list | dict)]


class Containers:
    """Lists, dicts and dataclasses among the arguments of a call, recorded before the call."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        containers = [
            x for x in (*args, *kwargs.values()) if isinstance(x, list | dict) or _is_data(x)
        ]
        self._before = [(container, _entries(container)) for container in containers]

    def changed(self, output: Any, *, is_copy: bool) -> str | None:
        """Return the type of a container changed by the call. None: no change.

        Args:
            output: Output of the call. A dataclass that the call fills and returns is handed on.
            is_copy: Whether ``output`` is a copy of the call's output.
        """
        for container, record in self._before:
            is_same = type(container) is type(output) if is_copy else container is output
            if not (is_same and _is_data(output)) and _entries(container) != record:
                return type(container).__name__
        return None


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _entries(container: Any) -> list[tuple[Any, int]]:
    if _is_data(container):
        container = {
            field.name: getattr(container, field.name, None) for field in fields(container)
        }
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
