"""Modules that another pipeline rank holds: they stay in their places, without tensors.

An absent module keeps its attributes, its children and its position in lists, so that indices,
slices, ``len`` and loops mean what they do in the full model. Its parameters and buffers are gone
from ``parameters()``, ``buffers()`` and ``state_dict()``; in their places are plain attributes on
``meta`` (:class:`AbsentTensor`), so that code may still ask for a dtype or a shape, and fails where
it computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.errors import PipelineError, ShardingError

_MARK = "_megatron_absent"
_ASKED = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "grad")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
_FREEZES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class AbsentTensor(Tensor):
    """Shape and dtype of a tensor that another pipeline rank holds.

    Some operations take a tensor on ``meta`` for one of uninitialized memory, so that all but
    questions about it are refused.
    """

    path: str

    @classmethod
    def of(cls, tensor: Tensor, path: str) -> AbsentTensor:
        """Represent ``tensor``, whose name is ``path``."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        made: AbsentTensor = torch.Tensor._make_subclass(cls, empty)
        made.path = path
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        if func in _ASKED:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in _FREEZES:  # another rank's parameter is frozen there
            return args[0]
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise ShardingError(
            f"{', '.join(leaf.path for leaf in found)} belongs to a unit on another pipeline rank, "
            "and is read outside of that unit. A parameter that the forward reads stays on every "
            "rank if that is known before the model is divided: give the LightningModule an "
            "example_input_array (transformers models have dummy_inputs). A buffer does not: name "
            "units without it in PipelineOptions(units=[...])."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return AbsentTensor.of(self, self.path)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _represent, (tuple(self.shape), self.dtype, self.path)


def _represent(shape: tuple[int, ...], dtype: torch.dtype, path: str) -> AbsentTensor:
    return AbsentTensor.of(torch.empty(shape, dtype=dtype, device="meta"), path)


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


def _stay(*_: Any, **__: Any) -> None:
    """Take the place of ``Module._apply``, which moves and casts tensors."""


def make_absent(module: nn.Module, path: str, kept: Collection[int] = ()) -> None:
    """Remove the parameters and buffers of ``module``, in place.

    Args:
        module: The module at ``path``.
        path: Its path, for messages.
        kept: Ids of tensors that stay, since other modules use them too.
    """
    for inner, child in module.named_modules(prefix=path):
        for registry in (child._parameters, child._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) not in kept:
                    del registry[name]
                    child.__dict__[name] = AbsentTensor.of(tensor, f"{inner}.{name}")
        if isinstance(child, nn.RNNBase):  # keeps its weights in a list as well
            child._flat_weights = [getattr(child, name) for name in child._flat_weights_names]
    module._compiled_call_impl = None
    module.__dict__["_apply"] = _stay
    module.__dict__["forward"] = _AbsentForward(path)
    module.__dict__[_MARK] = True  # recomputation and others may wrap the forward


def is_absent(module: nn.Module) -> bool:
    """Return whether another pipeline rank holds the module."""
    return _MARK in module.__dict__


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
