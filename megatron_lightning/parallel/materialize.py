"""Fill the parameters of a model that was built on ``meta``: each rank its part of the values that one process would have."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.sharding import ShardSpec, named_shard_specs, tied_names


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate what is on ``meta`` on ``device`` and fill it, in place; the rest of the model is left as it is.

    Every parameter's values come from ``init_weights(name, tensor)`` of the outermost module that has such a method: it fills
    ``tensor``, which has the global shape and is fp32 for floating types, with the initial values of the parameter ``name``
    (relative to that module). This rank keeps its part, so it never holds more than its part and one whole parameter.

    Args:
        model: Reduced to this rank's pipeline units and parallelized.
        device: Where the model trains.

    Raises:
        ConfigError: If a module on ``meta`` has no ``init_weights``.
    """
    specs, ties, filled = named_shard_specs(model), tied_names(model), {}
    for path, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if not tensor.is_meta:
            continue
        if id(tensor) not in filled:
            spec = specs.get(path) or ShardSpec.replicated(tensor.shape)
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            whole = torch.empty(spec.global_shape, dtype=dtype, device=device)
            owner, name = _initializer(model, ties.get(path, path))
            with torch.no_grad():
                owner(name, whole)
                part = spec.shard(whole).to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            filled[id(tensor)] = nn.Parameter(part, requires_grad=tensor.requires_grad) if is_parameter else part
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, filled[id(tensor)])


def _initializer(model: nn.Module, path: str) -> tuple[Callable[[str, Tensor], None], str]:
    """Return the outermost ``init_weights(name, tensor)`` above ``path``, and the name it knows the tensor by."""
    segments, modules = path.split("."), dict(model.named_modules())
    for depth in range(len(segments)):
        method = getattr(modules.get(".".join(segments[:depth])), "init_weights", None)
        if method is not None and len(signature(method).parameters) == 2:  # other libraries use the name for other things
            return method, ".".join(segments[depth:])
    raise ConfigError(
        f"{path} is on the meta device, and no module above it has init_weights(name, tensor), so its values are unknown. "
        "Add that method to the model, or build the model on a real device."
    )
