"""Fill the shards of a model built on ``meta`` with the initial values of a single process."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn

from megatron_lightning.compat import GradientHooks
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.attachments import Attachment
from megatron_lightning.parallel.shards.parameters import copy_attributes
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.spec import Shape, ShardSpec
from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.parallel.shards.ties import tied_names

_EMPTY = "_left_empty"


def leave_empty(module: nn.Module) -> None:
    """Allocate the tensors of a module on ``meta`` without values, since the caller fills the
    tensors.
    """
    module.__dict__[_EMPTY] = True


def is_left_empty(model: nn.Module, path: str) -> bool:
    """Return whether :func:`leave_empty` was called for a module above the tensor at ``path``.
    False inside of an attachment, which initializes itself.
    """
    segments = path.split(".")
    modules = [model.get_submodule(".".join(segments[:depth])) for depth in range(len(segments))]
    if any(isinstance(module, Attachment) for module in modules):
        return False
    return any(_EMPTY in module.__dict__ for module in modules)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the tensors on ``meta`` on ``device`` and fill the tensors, in place. Other tensors
    stay unchanged.

    Every parameter's values come from ``init_weights(name, tensor)`` of the parameter's attachment,
    or else of the outermost module with such a method. The method fills ``tensor`` with the initial
    values of the parameter ``name`` (relative to the method's module). ``tensor`` has the global
    shape and is fp32 for floating types. A rank never holds more than the rank's shards and one
    full parameter. Below :func:`leave_empty` tensors are only allocated.

    Raises:
        ConfigError: If a module on ``meta`` has no ``init_weights``.
    """
    specs, ties, filled = named_shard_specs(model), tied_names(model), {}
    for path, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if not tensor.is_meta:
            continue
        # A tied tensor has several paths, and gets one memory.
        if id(tensor) not in filled:
            spec = specs.get(path) or ShardSpec.replicated(tensor.shape)
            if is_left_empty(model, path):
                shard = torch.empty_like(tensor, device=device)
            else:
                name, shape = ties.get(path, path), spec.global_shape
                # The full tensor is drawn and this rank's boxes taken, so that values do not depend
                # on the layout. One full tensor exists at a time.
                full = initial_value(model, name, shape, tensor.dtype, device)
                if isinstance(tensor, StoredWeight):
                    full = tensor.stored(full)
                shard = spec.shard(full).to(tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                shard = nn.Parameter(shard, requires_grad=tensor.requires_grad)
                GradientHooks(tensor).move(shard)
                copy_attributes(vars(tensor), shard)
            filled[id(tensor)] = shard
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, filled[id(tensor)])


def initial_value(
    model: nn.Module, path: str, shape: Shape, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return the full initial value of the tensor at ``path``, of ``shape``, in fp32 if ``dtype``
    is floating.
    """
    full = torch.empty(
        shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device=device
    )
    owner, name = _initializer(model, path)
    with torch.no_grad():
        owner(name, full)
    return full


def _initializer(model: nn.Module, path: str) -> tuple[Callable[[str, Tensor], None], str]:
    """Return the ``init_weights(name, tensor)`` for the tensor at ``path``, and the tensor's name
    as an argument of the method.
    """
    segments = path.split(".")
    owners = [model.get_submodule(".".join(segments[:depth])) for depth in range(len(segments))]
    for depth, owner in enumerate(owners):
        if isinstance(owner, Attachment):
            return owner.init_weights, ".".join(segments[depth:])
    for depth, owner in enumerate(owners):
        method = getattr(owner, "init_weights", None)
        # Other libraries use the name for other things.
        if method is not None and len(signature(method).parameters) == 2:
            return method, ".".join(segments[depth:])
    raise ConfigError(
        f"{path} is on the meta device, and no module above it has init_weights(name, tensor), so "
        "its values are unknown. Add that method to the model, or build the model on a real "
        "device."
    )
