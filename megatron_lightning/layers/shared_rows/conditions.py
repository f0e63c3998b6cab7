"""Conditions of a probe: small windows, exact products, no dropout, weights in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from megatron_lightning.layers.shared_rows.places import changed

_REACHES = (
    "sliding_window", "attention_chunk_size", "window_size", "keep_window_size", "local_attention",
    "attention_window_size", "sliding_window_size", "local_attention_window_len",
    "index_topk", "floor_scale", "log_scaling_n_floor",
)  # fmt: skip
"""Attributes of modules and configurations: how many tokens a query sees, or from which position on
its scores are scaled."""
_DROPOUT_RATES = ("attention_dropout", "dropout", "dropout_p", "dropout_prob")
_SMALLEST_REACH, _LONGEST_REACH = 7, 10
_16_BITS = (torch.bfloat16, torch.float16)


@contextmanager
def small_windows(model: nn.Module) -> Iterator[None]:
    """Context in which windows, chunks and numbers of chosen keys are smaller than a probed row.

    A window of 4,096 tokens hides nothing in a row of 40, and attention without it would pass for
    equal. Different sizes stay different.
    """
    owners = {id(x): x for x in (*model.modules(), *_configurations(model))}.values()
    reaches: list[tuple[Any, str, int]] = [
        (owner, name, vars(owner)[name])
        for owner in owners
        for name in _REACHES
        if type(vars(owner).get(name)) is int and vars(owner)[name] > _LONGEST_REACH
    ]
    sizes = sorted({size for _, _, size in reaches})
    with ExitStack() as undo:
        for owner, name, size in reaches:
            undo.callback(vars(owner).__setitem__, name, size)
            vars(owner)[name] = _SMALLEST_REACH + sizes.index(size)
        yield


def has_reach(module: nn.Module) -> bool:
    """Return whether a module, or its configuration, has a window that probes know."""
    owners = (*module.modules(), *_configurations(module))
    return any(type(vars(owner).get(name)) is int for owner in owners for name in _REACHES)


def _configurations(model: nn.Module) -> Iterator[Any]:
    """Yield the configurations of a model and of its parts."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            yield config
            yield config.get_text_config()


@contextmanager
def exact_products() -> Iterator[None]:
    """Context in which products of fp32 tensors on CUDA are not rounded to TF32."""
    backends: Any = torch.backends
    with ExitStack() as undo:
        for backend in (backends.cuda.matmul, backends.cudnn.conv):
            undo.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = "ieee"
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context without dropout."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


def plain_attributes(model: nn.Module) -> dict[str, object]:
    """Return path of an attribute -> value of the public numbers, names and switches of all
    modules, by which code chooses what it computes.
    """
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_")
    }


def dropout_of(module: nn.Module) -> float:
    """Return the largest dropout in a module, of dropout layers or of rates by their names."""
    children = list(module.modules())
    rates: list[object] = [child.p for child in children if isinstance(child, _DropoutNd)]
    rates += [vars(child).get(name) for child in children for name in _DROPOUT_RATES]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def has_16_bits(module: nn.Module) -> bool:
    """Return whether a module has weights of 16 bits, with which choices of experts and keys depend
    on roundings.
    """
    return any(p.dtype in _16_BITS for p in module.parameters())


@contextmanager
def in_fp32(module: nn.Module, values: Any) -> Iterator[Any]:
    """Context in which a module has copies of its weights and buffers in fp32. Yield the values
    with every tensor of 16 bits in fp32.
    """

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().float() if tensor.dtype in _16_BITS else tensor

    with ExitStack() as undo:
        for child in module.modules():
            stores: list[dict[str, Any]] = [child._parameters, child._buffers]
            for tensors in stores:
                for name, tensor in list(tensors.items()):
                    if tensor is not None and tensor.dtype in _16_BITS:
                        undo.callback(tensors.__setitem__, name, tensor)
                        tensors[name] = _like(tensor, wide(tensor))
        yield changed(values, lambda _, tensor: wide(tensor))


def _like(tensor: Tensor, data: Tensor) -> Any:
    """Return ``data`` as a parameter, if ``tensor`` is one, with the same attributes."""
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=False)
    vars(parameter).update(vars(tensor))
    return parameter


_EQUAL: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.float64: 1e-9})
"""Share of the largest output, up to which two ways are equal: sums in another order."""
_EQUAL_IN_16_BITS = 2e-2


def is_close(found: Tensor | None, expected: Tensor, noise: float = 0.0) -> bool:
    """Return whether two ways to compute a tensor agree, up to sums in another order, or up to
    ``noise``.
    """
    if found is None or found.shape != expected.shape:
        return False
    tolerance = _EQUAL.get(expected.dtype, _EQUAL_IN_16_BITS) * float(expected.abs().max())
    return bool((found - expected).abs().max() <= max(tolerance, noise))
