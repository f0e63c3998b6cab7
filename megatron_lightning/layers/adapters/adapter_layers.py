"""Adapters as children of the adapted layers, by any method (LoRA, DoRA, VeRA).

An adapted layer returns y plus the output of the child ``adapters``, which a forward hook adds. The
layer keeps its class, parameter names and computation (an engine, quantized GEMMs).

    q_proj.weight                      [out, in], frozen
    q_proj.adapters.all.<parameter>    see :mod:`megatron_lightning.layers.adapters.part`

A layer may fuse several matrices in a weight (query, key and value, or gate and up). Such a layer
has one adapter for all rows, or an adapter for each matrix: ``linear_qkv.adapters.q``, ``.k``,
``.v``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.magnitude import has_magnitude, scaled_output
from megatron_lightning.layers.adapters.part import AdapterPart
from megatron_lightning.parallel.shards.attachments import Attachment

ALL_ROWS = "all"
"""Name of an adapter of all rows of a weight."""
_CHILD = "adapters"
_ROW_DIMS = 3  # of the inputs of layers: batch, sequence and features


class Adapters(Attachment):
    """The adapters of a layer: one for all rows, or one for each matrix.

    Args:
        parts: Name -> adapter.
        path: Path of the layer in the full model. Seeds the initial values.
        num_groups: Query groups of a fused projection with interleaved matrices. 0: the matrices
            follow each other.
    """

    def __init__(self, parts: Mapping[str, AdapterPart], path: str, *, num_groups: int = 0) -> None:
        super().__init__()
        self.enabled = True
        """False: the layer computes without adapters."""
        self.in_weight = False
        """True: the layer adds the adapters to its weight, and not to its output."""
        self.half_dim: int | None = None
        """Batch dim of inputs whose first half is computed without adapters, or with ``first``.
        None: all rows have adapters."""
        self.first: Mapping[str, Tensor] = {}
        """Parameter name -> values for the rows of the first half. Empty: these have no
        adapters."""
        self.num_groups = num_groups
        self.initial: dict[str, Tensor] = {}
        """Parameter name -> initial values in the place of random values."""
        self._seed = path
        for name, part in parts.items():
            self.add_module(name, part)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                with torch.no_grad():
                    self.init_weights(name, parameter)

    @property
    def parts(self) -> dict[str, AdapterPart]:
        """Name -> adapter."""
        children = self.named_children()
        return {name: child for name, child in children if isinstance(child, AdapterPart)}

    def init_weights(self, name: str, tensor: Tensor) -> None:
        """Fill the full parameter ``name`` as the part's method does, from a generator seeded by
        the name. Loaded adapters use ``initial`` instead.
        """
        if name in self.initial:
            tensor.copy_(self.initial[name])
            return
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        part, _, own_name = name.partition(".")
        self.parts[part].initialize(own_name, tensor, draws)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map the layer's input x [..., in] to the addition to the layer's output [..., out]."""
        parameter = next(self.parameters())
        if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
            x = x.to(parameter.dtype)
        return self.joined([part(x, *counts) for part in self.parts.values()])

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with other values of the parameters inside the block, without gradients and
        without dropout.
        """
        trained = dict(self.named_parameters())
        _set_parameters(self, {n: nn.Parameter(values[n], requires_grad=False) for n in trained})
        dropouts = [part.dropout for part in self.parts.values()]
        modes = [dropout.training for dropout in dropouts]
        for dropout in dropouts:
            dropout.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            _set_parameters(self, trained)
            for dropout, mode in zip(dropouts, modes, strict=True):
                dropout.training = mode

    def joined(self, deltas: list[Tensor]) -> Tensor:
        """Return the outputs [..., out] of the parts in the order of the layer's output."""
        if len(deltas) == 1:
            [delta] = deltas
            return delta
        if self.num_groups:  # rows of a group: queries, key, value
            deltas = [d.view(*d.shape[:-1], self.num_groups, -1) for d in deltas]
            return torch.cat(deltas, dim=-1).flatten(-2)
        return torch.cat(deltas, dim=-1)


def _set_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._parameters[last] = parameter


def attach(layer: nn.Module, adapters: Adapters) -> None:
    """Make ``adapters`` a child of ``layer``, and add the child's result to the layer's output.

    Raises:
        ConfigError: If the layer has adapters, or another attribute of the same name.
    """
    if hasattr(layer, _CHILD):
        raise ConfigError(
            f"a {type(layer).__name__} has an attribute {_CHILD!r} already, under which LoRA keeps "
            "its adapters. Apply LoRA once to a model; to another model, or rename the attribute."
        )
    layer.add_module(_CHILD, adapters)
    layer.register_forward_hook(add_adapters, with_kwargs=True)


def detach(layer: nn.Module) -> None:
    """Remove the adapters of a layer."""
    for key, hook in list(layer._forward_hooks.items()):
        if hook is add_adapters:
            del layer._forward_hooks[key]
            layer._forward_hooks_with_kwargs.pop(key, None)
    del layer._modules[_CHILD]


def add_adapters(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Forward hook of an adapted layer: add the output of the adapters."""
    adapters = adapters_of(layer)
    if adapters is None or not adapters.enabled or adapters.in_weight:
        return output
    if adapters.half_dim is not None:
        return _add_to_second_half(layer, adapters, (args, kwargs), output)
    delta: Tensor = adapters(*args, *kwargs.values())
    return _added(layer, adapters, output, delta)


def _added(layer: nn.Module, adapters: Adapters, output: Tensor, delta: Tensor) -> Tensor:
    """Return the output of an adapted layer."""
    if has_magnitude(adapters):
        return scaled_output(layer, adapters, output, delta)
    return output + delta.to(output.dtype)


def _add_to_second_half(
    layer: nn.Module,
    adapters: Adapters,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    output: Tensor,
) -> Tensor:
    """Add the output of the adapters to the second half of the rows."""
    [x] = (*given[0], *given[1].values())  # of experts there are counts as well
    if x.ndim < _ROW_DIMS:
        raise ConfigError(
            f"a {type(layer).__name__} gets rows of shape {tuple(x.shape)} without a batch dim, as "
            "in experts of untouched models, so that adapters cannot leave out the rows of a "
            "reference. Leave the layer out by exclude_modules, or set the reference of DPOModule "
            'to "model" or "scores".'
        )
    dim = (adapters.half_dim or 0) - _ROW_DIMS  # layers may flatten dims in front
    x_first, x_second = x.chunk(2, dim)
    first, second = output.chunk(2, dim)
    if adapters.first:
        with adapters.holding(adapters.first):
            first = _added(layer, adapters, first, adapters(x_first.contiguous()))
    delta: Tensor = adapters(x_second.contiguous())
    return torch.cat([first, _added(layer, adapters, second, delta)], dim)


def adapters_of(layer: nn.Module) -> Adapters | None:
    """Return the adapters of a layer, or None."""
    child = layer._modules.get(_CHILD)
    return child if isinstance(child, Adapters) else None


def adapted_layers(module: nn.Module) -> dict[str, Adapters]:
    """Return layer path -> adapters, for all adapted layers in ``module``."""
    layers = ((path, adapters_of(layer)) for path, layer in module.named_modules())
    return {path: adapters for path, adapters in layers if adapters is not None}


@contextmanager
def adapters_for_second_half(module: nn.Module, batch_dim: int) -> Iterator[None]:
    """Compute the first half of the rows without adapters, or with their ``first`` values, inside
    the block: a frozen reference in the same call, for models called only once.

    A forward with gradients leaves the setting for a recomputation in the backward. Call
    :func:`adapters_for_all_rows` after the backward.

    Args:
        module: A module with adapters. The inputs of adapted layers have three dims.
        batch_dim: Dim of the rows in these inputs.
    """
    for adapters in adapted_layers(module).values():
        adapters.half_dim = batch_dim
    stays = False
    try:
        yield
        stays = torch.is_grad_enabled()
    finally:
        if not stays:
            adapters_for_all_rows(module)


def adapters_for_all_rows(module: nn.Module) -> None:
    """Compute all rows with adapters again, after :func:`adapters_for_second_half`."""
    for adapters in adapted_layers(module).values():
        adapters.half_dim = None


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Compute without adapters inside the block: the base model, such as a frozen reference."""
    attachments = list(adapted_layers(module).values())
    states = [adapters.enabled for adapters in attachments]
    for adapters in attachments:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters, enabled in zip(attachments, states, strict=True):
            adapters.enabled = enabled
