"""Stubs of units that do not run on a stage: placeholders of outputs, and the user's hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.pipeline.stages.structure import Like

_NOT_ON_STUBS = ("torch.distributed.fsdp", "megatron_lightning")
_LIBRARIES = ("torch", "megatron_lightning", "transformers", "lightning")


class Placeholders:
    """Memory of the shapes of outputs that were not sent; code may write into it.

    Args:
        value: Of floating-point tensors; others are zero.
        device: Device of the tensors.
    """

    def __init__(self, value: float, device: torch.device) -> None:
        self._value = value
        self._device = device
        self._known: dict[Like, Tensor] = {}

    def of(self, like: Like, *, fresh: bool = False) -> Tensor:
        """Return a tensor; ``fresh``: in storage of its own, else one that several outputs may
        share until something writes into it.
        """
        known = None if fresh else self._known.get(like)
        if known is None or known.requires_grad or num_writes(known):
            value = self._value if like.dtype.is_floating_point else 0
            known = torch.full(like.shape, value, dtype=like.dtype, device=self._device)
            self._known[like] = known
        return known


def num_writes(tensor: Tensor) -> int:
    """Return the number of writes into a tensor, as far as they are counted."""
    return 0 if tensor.is_inference() else tensor._version


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the user's forward hooks of a module."""
    hooks = module._forward_hooks.values()
    return [hook for hook in hooks if _module_of(hook).partition(".")[0] not in _LIBRARIES]


def hooks_inside(module: nn.Module, units: Iterable[str]) -> list[str]:
    """Return the modules inside of units whose forward hooks run on the unit's stage only."""
    return [
        f"{unit}.{path}"
        for unit in units
        for path, child in module.get_submodule(unit).named_modules()
        if path and user_hooks(child)
    ]


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", None) or "")


def with_hooks(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Run the user's forward hooks of a unit that does not run; some record outputs."""
    for key, hook in unit._forward_hooks.items():
        if _module_of(hook).startswith(_NOT_ON_STUBS):
            continue
        with_kwargs = key in unit._forward_hooks_with_kwargs
        result = hook(unit, args, kwargs, output) if with_kwargs else hook(unit, args, output)
        output = output if result is None else result
    return output
