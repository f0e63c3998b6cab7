"""Checks of hooks that clip gradients themselves: torch's functions see what one rank holds, which may be a part or nothing."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.utilities import grad_norm
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.layout import ParallelLayout

BY_NORM = frozenset({"clip_grad_norm_"})
BY_VALUE = frozenset({"clip_grad_value_"})


def check_gradient_readers(trainer: pl.Trainer, layout: ParallelLayout, data_parallel: str, num_replicas: int) -> None:
    """Check which functions of gradients the hooks of the module and of the callbacks call, and what these call of the user's.

    Args:
        trainer: Who is going to fit a module.
        layout: Sizes of the parallel axes.
        data_parallel: The strategy's mode.
        num_replicas: Data-parallel ranks.

    Raises:
        ConfigError: For a hook that clips what is not the whole gradient; one that also calls ``clip_gradients`` chooses
            between the two by strategy. Of norms that are only logged the user is warned.
    """
    sharded = data_parallel != "ddp" and num_replicas * layout.cp > 1
    if not sharded and layout.tp * layout.pp == 1:
        return
    found = f'tensor {layout.tp} x pipeline {layout.pp}, data_parallel="{data_parallel}" over {num_replicas}'
    clips = BY_NORM | BY_VALUE if sharded else BY_NORM
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    owners: list[pl.LightningModule | pl.Callback] = [trainer.lightning_module, *callbacks]
    for owner in owners:
        for hook in _own_hooks(owner):
            used = [(function, name) for function in _reached(hook, type(owner)) for name in _names(function.__code__)]
            names = {name for _, name in used}
            if names & clips and "clip_gradients" not in names:
                raise ConfigError(
                    f"{type(owner).__name__}.{hook.__name__} calls {min(names & clips)}, which sees the gradients that one "
                    f"rank holds: a part of them, or none ({found}). Call the LightningModule's clip_gradients(optimizer, "
                    "gradient_clip_val=..., gradient_clip_algorithm=...) instead, or set Trainer(gradient_clip_val=...): both "
                    "clip by what all ranks hold."
                )
            if any(function.__globals__.get(name) is grad_norm for function, name in used):
                rank_zero_warn(
                    f"{type(owner).__name__}.{hook.__name__} calls grad_norm, which sees the gradients that one rank holds: a "
                    f"part of them, or none ({found}). The callback GradientNormMonitor logs the norm over all ranks."
                )


def _own_hooks(owner: pl.LightningModule | pl.Callback) -> Iterator[types.FunctionType]:
    """Yield the methods that replace one of Lightning's, without their decorators."""
    base = pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.Callback
    for name in dir(base):
        method = getattr(type(owner), name, None)
        if method is not getattr(base, name) and callable(method):
            hook = inspect.unwrap(method)
            if isinstance(hook, types.FunctionType):
                yield hook


def _reached(hook: types.FunctionType, owner: type) -> Iterator[types.FunctionType]:
    """Yield ``hook`` and the user's own methods and functions that it calls by their names, directly or by way of others."""
    waiting, seen = [hook], {hook}
    while waiting:
        function = waiting.pop()
        yield function
        for name in _names(function.__code__):
            for found in (getattr(owner, name, None), function.__globals__.get(name)):
                called = inspect.unwrap(found) if isinstance(found, types.FunctionType) else None
                if isinstance(called, types.FunctionType) and called not in seen and not _is_of_a_library(called):
                    seen.add(called)
                    waiting.append(called)


def _is_of_a_library(function: types.FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] in ("torch", "lightning", "lightning_utilities", "megatron_lightning")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code uses, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
