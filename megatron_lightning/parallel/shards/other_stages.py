"""Modules held by another pipeline rank. The modules stay in place, without tensors.

An absent module keeps attributes, children and the position in lists, so that indices, slices,
``len`` and loops mean the same as in the full model. The module's parameters and buffers are
missing from ``parameters()``, ``buffers()`` and ``state_dict()``. In place of the tensors are plain
attributes on ``meta`` (:class:`AbsentTensor`). Code may still ask for a dtype or a shape, and fails
when computing with the tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.errors import PipelineError, ShardingError

_MARK = "_megatron_absent"
_ASKED = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_meta",
        "grad",
        "is_leaf",
        "itemsize",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_DEVICE = torch.Tensor.device.__get__
_READ_ELSEWHERE = (
    "A parameter that the forward reads stays on every rank if that is known before the model is "
    "partitioned: give the LightningModule an example_input_array (transformers models have "
    "dummy_inputs). A buffer does not: name units without it in PipelineOptions(units=[...]). A "
    "hook reads full weights by strategy.full_tensors(), and writes full weights by "
    "load_state_dict(..., strict=False) of the LightningModule."
)
_LISTED = (
    "A pipeline rank has the parameters of its own stages, and a step that computes with all "
    "parameters() would miss the others. Set weight_decay of the optimizer for a penalty (for SGD "
    "twice the factor of the sum of squares), or compute it in the forward of each unit and report "
    "it by a StepReport (docs/own_model.md)."
)
_LIKE = frozenset(  # state of an optimizer, on ``meta``
    {torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like}
)
_FREEZES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class AbsentTensor(Tensor):
    """Shape and dtype of a tensor held by another pipeline rank.

    Some operations mistake a tensor on ``meta`` for uninitialized memory. Everything but questions
    about the tensor is therefore refused.
    """

    path: str
    is_parameter: bool
    advice: str
    original: weakref.ref[Tensor] | None
    """The tensor of the full model, if user code still holds the tensor."""
    home: torch.device | None = None
    """Device that code is told of. None: ``meta``."""

    @classmethod
    def of(
        cls, tensor: Tensor, path: str, *, is_parameter: bool = False, advice: str = ""
    ) -> AbsentTensor:
        """Represent ``tensor`` with the name ``path``.

        ``advice``: Advice for the error of a read.
        """
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        absent: AbsentTensor = torch.Tensor._make_subclass(cls, empty, tensor.requires_grad)
        vars(absent).update(vars(tensor))  # attributes by which users tell parameters apart
        absent.path = path
        absent.is_parameter = is_parameter
        absent.advice = advice or _READ_ELSEWHERE
        absent.original = None
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        if func == _DEVICE and args[0].home is not None:
            return args[0].home
        if func in _ASKED or func in _FREEZES:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in _LIKE and isinstance(args[0], cls):
            like = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return func(like, *args[1:], **(kwargs or {}))
        absent_leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise ShardingError(
            f"{', '.join(leaf.path for leaf in absent_leaves)} belongs to a unit on another "
            f"pipeline rank, and is read outside of that unit. {absent_leaves[0].advice}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return AbsentTensor.of(self, self.path, is_parameter=self.is_parameter, advice=self.advice)

    def __reduce_ex__(self, protocol: Any) -> Any:
        like = (tuple(self.shape), self.dtype, self.requires_grad)
        return _represent, (like, self.path, self.is_parameter, self.advice)


def _represent(
    like: tuple[tuple[int, ...], torch.dtype, bool], path: str, is_parameter: bool, advice: str
) -> AbsentTensor:
    shape, dtype, requires_grad = like
    empty = torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    return AbsentTensor.of(empty, path, is_parameter=is_parameter, advice=advice)


class StaleParameter(nn.Parameter):
    """Parameter of the full model, trained by another pipeline rank, in a list of the user's own.
    The values are from before the training, and refuse to be read.

    The parameter gets this class in place: the list belongs to user code, and torch passes
    functions to the class of a tensor alone.
    """

    path: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        if func in _ASKED or func in _FREEZES:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        leaves = tree_leaves((args, kwargs))
        path = next(leaf.path for leaf in leaves if isinstance(leaf, cls))
        raise ShardingError(
            f"a list or dict holds {path}, which belongs to a unit on another pipeline rank and is "
            f"trained there. {_LISTED}"
        )


class _AbsentForward:
    """Forward of an absent module. Plain data, so that the module stays copyable.

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
    """Replace ``Module._apply``, the method to move and cast tensors."""


def make_absent(module: nn.Module, path: str, kept: Collection[int] = ()) -> None:
    """Remove the parameters and buffers of ``module``, in place.

    Args:
        module: The module at ``path``.
        path: The module's path, for messages.
        kept: Ids of tensors to keep, since other modules use the tensors too.
    """
    for inner, child in module.named_modules(prefix=path):
        for registry in (child._parameters, child._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) not in kept:
                    del registry[name]
                    is_parameter = registry is child._parameters
                    absent = AbsentTensor.of(tensor, f"{inner}.{name}", is_parameter=is_parameter)
                    absent.original = weakref.ref(tensor)
                    child.__dict__[name] = absent
        if isinstance(child, nn.RNNBase):  # also has a list of the weights
            child._flat_weights = [getattr(child, name) for name in child._flat_weights_names]
    module._compiled_call_impl = None
    module.__dict__["_apply"] = _stay
    module.__dict__["forward"] = _AbsentForward(path)
    module.__dict__[_MARK] = True  # recomputation and other code may wrap the forward


def is_absent(module: nn.Module) -> bool:
    """Return whether another pipeline rank holds the module."""
    return _MARK in module.__dict__


def present_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as ``root.named_modules()``, without absent modules and the modules inside."""
    seen_modules: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen_modules or is_absent(module):
            return
        seen_modules.add(module)
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{path}.{name}" if path else name)

    return walk(root, path)


class AbsentListing:
    """Make ``parameters()`` and ``named_parameters()`` list absent parameters as well, in the order
    of the full model. Code that computes with all parameters then fails instead of using a part for
    all. Code that goes by positions means the same as on a single device.

    Args:
        root: Module with absent units.
        device: Device that absent parameters tell: models move tensors to the device of their first
            parameter. None: ``meta``.
    """

    def __init__(self, root: nn.Module, device: torch.device | None = None) -> None:
        self._device = device
        self._modules: list[nn.Module] = []
        self._find(root, set())
        for path, module in root.named_modules():
            for name, value in module.__dict__.items():
                if isinstance(value, AbsentTensor):  # messages name the tensor as the root does
                    value.path = f"{path}.{name}" if path else name
        self._mark_stale(root)

    def _mark_stale(self, root: nn.Module) -> None:
        """Mark absent parameters still held in lists of the user's."""
        registered = {id(parameter) for parameter in root.parameters()}
        for module in self._modules:
            for value in module.__dict__.values():
                if not _is_absent_parameter(value):
                    continue
                original = value.original() if value.original else None
                if type(original) is nn.Parameter and id(original) not in registered:
                    original.__class__ = StaleParameter
                    cast(StaleParameter, original).path = value.path

    def _find(self, module: nn.Module, seen: set[nn.Module]) -> bool:
        """Return whether a module or a module inside lacks parameters. Record modules that lack
        parameters.
        """
        if module in seen:
            return False
        seen.add(module)
        children_lack = [self._find(child, seen) for child in module.children()]
        lacks = any(children_lack) or any(map(_is_absent_parameter, module.__dict__.values()))
        if lacks:
            self._modules.append(module)
        return lacks

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context that lists absent parameters."""
        for module in self._modules:
            module.__dict__["named_parameters"] = partial(_named_parameters, module, self._device)
        try:
            yield
        finally:
            for module in self._modules:
                module.__dict__.pop("named_parameters", None)


def _is_absent_parameter(value: Any) -> bool:
    return isinstance(value, AbsentTensor) and value.is_parameter


def _named_parameters(
    module: nn.Module,
    device: torch.device | None,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Take the place of ``Module.named_parameters``, in the order of the full model."""
    seen_ids = set[int]()
    # A tied parameter may be absent by the first name and present by another.
    parameters = {id(p): p for _, p in nn.Module.named_parameters(module, recurse=recurse)}
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for path, child in modules:
        absent = [(n, value) for n, value in child.__dict__.items() if _is_absent_parameter(value)]
        for name, value in [*child._parameters.items(), *absent]:
            identity = _identity(value)
            if value is None or (remove_duplicate and identity in seen_ids):
                continue
            seen_ids.add(identity)
            listed = parameters.get(identity, value)
            if isinstance(listed, AbsentTensor):
                listed = AbsentTensor.of(value, value.path, is_parameter=True, advice=_LISTED)
                listed.home = device
            yield f"{path}.{name}" if path else name, listed


def _identity(value: Any) -> int:
    """Return the id of a parameter. For an absent parameter, return the id of the parameter of the
    full model.
    """
    if not isinstance(value, AbsentTensor) or value.original is None:
        return id(value)
    original = value.original()
    return id(value if original is None else original)


def drop_absent(optimizer: Any) -> None:
    """Remove absent parameters from the optimizer's state and from the optimizer's groups, which
    may become empty.
    """
    for parameter in [p for p in getattr(optimizer, "state", ()) if isinstance(p, AbsentTensor)]:
        del optimizer.state[parameter]
    for group in getattr(optimizer, "param_groups", ()):
        is_present = [not isinstance(parameter, AbsentTensor) for parameter in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = list(compress(group[key], is_present))
