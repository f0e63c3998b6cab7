"""Modules that another pipeline rank holds: they stay in their places, without tensors.

An absent module keeps its attributes, its children and its position in lists, so that indices,
slices, ``len`` and loops mean what they do in the full model. Its parameters and buffers are gone
from ``parameters()``, ``buffers()`` and ``state_dict()``; in their places are plain attributes on
``meta``, so that code may still ask for a dtype or a shape, and fails where it computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from megatron_lightning.errors import PipelineError


class _AbsentForward:
    """Forward of an absent module; plain data, so that the module stays copyable.

    Args:
        path: Path of the module, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise PipelineError(
            f"{self.path} was called outside of the pipelined forward, and another pipeline rank "
            "holds its parameters. Call the model in a step; a checkpoint holds all of them."
        )


def make_absent(module: nn.Module, path: str, kept: Collection[int] = ()) -> None:
    """Remove the parameters and buffers of ``module``, in place.

    Args:
        module: The module at ``path``.
        path: Its path, for messages.
        kept: Ids of tensors that stay, since other modules use them too.
    """
    for child in module.modules():
        for registry in (child._parameters, child._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) not in kept:
                    del registry[name]
                    child.__dict__[name] = tensor.detach().to("meta")
    module._compiled_call_impl = None
    module.__dict__["forward"] = _AbsentForward(path)


def is_absent(module: nn.Module) -> bool:
    """Return whether another pipeline rank holds the module."""
    return isinstance(module.__dict__.get("forward"), _AbsentForward)


def absent_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return what represents the tensors of absent modules, on ``meta``, by their names."""
    found: dict[str, Tensor] = {}
    for path, module in root.named_modules():
        if is_absent(module):
            for inner, child in module.named_modules(prefix=path):
                found |= {
                    f"{inner}.{name}": value
                    for name, value in vars(child).items()
                    if isinstance(value, Tensor) and value.is_meta
                }
    return found


def present_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``root.named_modules()`` does, without absent modules and what is in them."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or is_absent(module):
            return
        seen.add(module)
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{path}.{name}" if path else name)

    return walk(root, path)
