"""Guard against lost writes: a view of a sharded parameter may be a copy.

``weight[50:]`` of a ``DTensor`` whose rows are sharded gathers the rows into new memory. A write
into it, such as ``weight[50:].zero_()``, changes no parameter, and torch says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_lightning.errors import ConfigError

_VIEWS = (
    *("__getitem__", "chunk", "diagonal", "flatten", "moveaxis", "movedim", "narrow", "permute"),
    *("ravel", "reshape", "select", "split", "squeeze", "swapaxes", "swapdims", "t"),
    *("tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
)


class CopiedView(DTensor):
    """A copy in place of a view of a sharded parameter. Writes are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        """Call a reading function.

        Raises:
            ConfigError: For a writing function.
        """
        name = str(getattr(func, "__name__", ""))
        targets = [(kwargs or {}).get("out"), args[0] if args and _writes(name) else None]
        if any(isinstance(leaf, CopiedView) for leaf in tree_leaves(targets)):
            raise ConfigError(
                f"{name} writes into a slice or view of a parameter that is sharded "
                '(data_parallel="fsdp"): the slice is a copy, gathered from several ranks, so that '
                "the parameter would not change. Write into all of the parameter by a function of "
                "each element (weight.mul_, weight.clamp_), or compute from "
                "strategy.full_tensors() and write with load_state_dict of the LightningModule, "
                "which takes full tensors."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _marked(result, CopiedView) if name in _VIEWS else result


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    is_operator = name.startswith("__i") and name not in {"__index__", "__int__", "__invert__"}
    return in_place or name in {"__set__", "__setitem__"} or is_operator


def _marked(result: Any, kind: type[DTensor]) -> Any:
    def mark(tensor: DTensor) -> DTensor:
        tensor.__class__ = kind
        return tensor

    return tree_map_only(DTensor, mark, result)


def _memory(tensor: Tensor) -> int:
    local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.untyped_storage().data_ptr()


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def view(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        memory = _memory(self)
        is_copy = any(
            isinstance(leaf, DTensor) and _memory(leaf) != memory for leaf in tree_leaves(result)
        )
        return _marked(result, CopiedView if is_copy else GuardedViews)

    return view


class GuardedViews(DTensor):
    """A ``DTensor`` with guarded views: writes are refused if the view is a copy."""


for _name in _VIEWS:
    setattr(GuardedViews, _name, _guarded(getattr(DTensor, _name)))
