"""Activation recomputation and offload for any model, by module paths.

Three ways to keep less for backward (https://arxiv.org/abs/1604.06174, selective recomputation:
https://arxiv.org/abs/2205.05198):

- *checkpointing* a module, or a run of layers: only inputs are kept, and the forward runs again in
  backward.
- *dropping the output* of a norm or an activation function (``dropped_outputs``): the layer that
  saves the output for backward stores a recipe instead. (Checkpointing a norm would gain nothing,
  because the next layer saves the output as its input.)
- *offloading* saved tensors to host memory (``offload``).

Each way wraps ``forward`` on the module (``wrapped_methods``), so names, parameters, hooks and
checkpoints stay unchanged. The second forward draws the same random numbers, from the default
generator and from the named streams, under the autocast of the first forward. Each backward runs
the second forward once with every schedule, because a deferred weight gradient has its inputs
already. Losses and gradients are bit-equal to a run without recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.activation import GatedUnit, SquaredReLU, SwiGLU
from megatron_lightning.layers.state.offload import offloaded
from megatron_lightning.layers.state.output_recompute import drop_output
from megatron_lightning.layers.wrapped_methods import (
    Forward,
    replace_attribute,
    replace_wrapped_forward,
    restore,
    wrap,
    wrapped_forward,
)
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.parallel.shards.patterns import compile_pattern

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("**.core_attention",),
    "layernorm": ("**.input_layernorm", "**.pre_mlp_layernorm"),
}
_CHEAP = (
    nn.LayerNorm, nn.RMSNorm, SwiGLU, GatedUnit, SquaredReLU, nn.SiLU, nn.GELU, nn.ReLU,
)  # fmt: skip


def apply_recompute(
    module: nn.Module,
    options: RecomputeOptions,
    *,
    stages: Sequence[Sequence[str]] = (),
) -> None:
    """Apply recomputation and offload to the modules named by ``options``, and replace the effects
    of an earlier call.

    Args:
        module: The full module, or this rank's part, parallelized.
        options: Modules, and how each keeps less.
        stages: Paths of the units of each pipeline stage on this rank. Empty: the module is one
            stage.

    Raises:
        ConfigError: If a group of recomputed layers spans several containers.
    """
    remove_recompute(module)
    if options.recompute_granularity == "selective":
        for path in _outermost(module, options.recompute_modules):
            child = module.get_submodule(path)
            # Cheap modules drop the output and keep the input. Checkpoints of others keep nothing
            # but the input.
            if isinstance(child, _CHEAP) or type(child).__name__.endswith("Norm"):
                drop_output(module, path)
            else:
                _checkpoint(child, "forward")
    elif options.recompute_granularity == "full":
        _checkpoint_layers(module, options, stages)
    # Last, so that saved tensors of recomputed modules are offloaded as well.
    for path in _outermost(module, options.offload_modules):
        wrap(
            module.get_submodule(path),
            "forward",
            partial(offloaded, min_bytes=options.offload_min_bytes),
        )


def remove_recompute(module: nn.Module) -> None:
    """Undo :func:`apply_recompute`."""
    for child in module.modules():
        restore(child)


def check_patterns(module: nn.Module, options: RecomputeOptions) -> None:
    """Check, on the full module, that every name and pattern matches a module.

    Raises:
        ConfigError: Names the first pattern without a match.
    """
    requested = {"offload_modules": options.offload_modules}
    if options.recompute_granularity == "selective":
        requested["recompute_modules"] = options.recompute_modules
    for option, patterns in requested.items():
        for pattern in patterns:
            if not any(_outermost(module, [pattern])):
                raise ConfigError(
                    f"{pattern!r} of {option} matches no module of "
                    f"{type(module).__name__}.{_similar(pattern, module)} Name a module as its "
                    "parent does, or give a pattern of its path, in which ** matches any number "
                    "of segments."
                )
    if options.recompute_granularity != "full":
        return
    layers = list(_outermost(module, options.recompute_layers))
    if not layers:
        lists = [
            path
            for path, child in module.named_modules()
            if isinstance(child, nn.ModuleList | nn.ModuleDict)
        ]
        hint = f" It has lists of modules at {', '.join(map(repr, lists))}." if lists else ""
        raise ConfigError(
            f"recompute_layers={list(options.recompute_layers)} match no module of "
            f"{type(module).__name__}.{hint} Set the "
            f'pattern of the paths of its layers, such as "{lists[0] if lists else "**.blocks"}.*".'
        )
    # Layers of one checkpoint run together, which needs a list that calls them in order.
    if options.recompute_method == "uniform" and (options.recompute_num_layers or 1) > 1:
        for path in _containers(layers):
            _check_together(module.get_submodule(path), options.recompute_num_layers)


def _similar(pattern: str, module: nn.Module) -> str:
    """Return a sentence with the names of the modules, the nearest to ``pattern`` first."""
    names = dict.fromkeys(path.rpartition(".")[2] for path, _ in module.named_modules())
    names.update(dict.fromkeys(alias for alias in _ALIASES if any(_outermost(module, [alias]))))
    candidates = [name for name in names if name and not name.isdecimal()]
    if not candidates:
        return ""
    last = pattern.rpartition(".")[2]
    [*nearest] = get_close_matches(last, candidates, n=1)
    meant = f" Did you mean {nearest[0]!r}?" if nearest and nearest[0] != last else ""
    listed = ", ".join(candidates[:20]) + (", …" if len(candidates) > 20 else "")
    return f"{meant} Its modules are called {listed}."


def recomputed_forward(module: nn.Module) -> Forward | None:
    """Return the function that backward runs again in the place of the forward of ``module``, or
    None.
    """
    wrapped = wrapped_forward(module)
    return wrapped.args[0] if wrapped is not None and wrapped.func is _checkpointed else None


def replace_recomputed(module: nn.Module, forward: Forward) -> None:
    """Run ``forward`` in place of :func:`recomputed_forward`, if ``module`` is recomputed."""
    wrapped = wrapped_forward(module)
    if wrapped is not None:
        replace_wrapped_forward(
            module, partial(wrapped.func, forward, *wrapped.args[1:], **wrapped.keywords)
        )


def draws_from_streams(module: nn.Module) -> bool:
    """Return whether layers in ``module`` draw from named random streams in training."""
    return any(
        isinstance(getattr(child, "streams", None), RngStreams) and getattr(child, "p", 1.0) > 0
        for child in module.modules()
    )


def _outermost(module: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yield the matching paths, without paths inside another match."""
    expanded = [
        pattern
        for name in names
        for pattern in _ALIASES.get(name, (name if "." in name else f"**.{name}", name))
    ]
    patterns = [compile_pattern(pattern) for pattern in expanded]
    last = None
    for path, _ in module.named_modules():
        if (last is None or not path.startswith(f"{last}.")) and any(
            pattern.fullmatch(path) for pattern in patterns
        ):
            last = path
            yield path


def _checkpoint(module: nn.Module, name: str) -> None:
    """Recompute a method of ``module`` in backward."""
    children = tuple(module.modules())
    drawing = tuple(
        child for child in children if isinstance(getattr(child, "streams", None), RngStreams)
    )
    wrap(module, name, partial(_checkpointed, drawing=drawing, children=children))


def _checkpointed(
    forward: Forward,
    /,
    *args: Any,
    drawing: Sequence[Any],
    children: Sequence[nn.Module],
    **kwargs: Any,
) -> Any:
    """Run ``forward`` and keep only the inputs.

    ``drawing``: the submodules with named random streams. ``children``: all submodules.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        forward, args = _with_distinct(forward, args)
        engines = (vars(child).get("engine") for child in children)
        engine_checkpoint = next(
            (e.checkpoint for e in engines if e is not None and e.checkpoint), None
        )
        if engine_checkpoint is not None:
            return engine_checkpoint(forward, *args, use_reentrant=False, **kwargs)
    streams = next((child.streams for child in drawing if getattr(child, "active_p", True)), None)
    if streams is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return _replayed(forward, streams, args, kwargs)


# torch.compile traces a checkpoint into the compiled layer, but not the checkpoint's contexts.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _replayed(
    forward: Forward, streams: RngStreams, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=partial(_replaying, streams), **kwargs
    )


def _with_distinct(forward: Forward, args: tuple[Any, ...]) -> tuple[Forward, tuple[Any, ...]]:
    """Return a function that runs ``forward`` on the distinct values of ``args``, and the distinct
    values.

    Saved-tensor hooks around a checkpoint return a separate tensor for each saved tensor. Query,
    key and value would no longer be one tensor, and attention would take another path in the second
    forward.
    """
    distinct = {id(value): value for value in args}
    if len(distinct) == len(args):
        return forward, args
    index = {identity: number for number, identity in enumerate(distinct)}
    places = [index[id(value)] for value in args]

    def run(*values: Any, **kwargs: Any) -> Any:
        return forward(*(values[place] for place in places), **kwargs)

    return run, tuple(distinct.values())


def _replaying(
    streams: RngStreams,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first and the second forward."""
    return nullcontext(), streams.replay()


def _checkpoint_layers(
    module: nn.Module, options: RecomputeOptions, stages: Sequence[Sequence[str]]
) -> None:
    layers = list(_outermost(module, options.recompute_layers))
    count = options.recompute_num_layers or 1
    if options.recompute_method == "uniform" and count > 1:
        for path in _containers(layers):
            _checkpoint_together(module.get_submodule(path), count)
        return
    if options.recompute_method == "block":
        layers = [
            path
            for stage in stages or [layers]
            for path in [path for path in layers if path in set(stage)][:count]
        ]
    for path in layers:
        _checkpoint(module.get_submodule(path), "forward")


def _containers(layers: Sequence[str]) -> Iterator[str]:
    """Yield the paths of the modules that hold the layer lists."""
    yield from dict.fromkeys(path.rpartition(".")[0].rpartition(".")[0] for path in layers)


def _check_together(container: nn.Module, count: int | None) -> None:
    if not hasattr(container, "layers_at_once"):
        raise ConfigError(
            f"recompute_method=uniform with recompute_num_layers={count}, and "
            f"{type(container).__name__} runs its layers one by one. Set recompute_num_layers to "
            "1, or give it layers_at_once and run_layers(layers, …) like TransformerBlock."
        )


def _checkpoint_together(container: nn.Module, count: int) -> None:
    """Recompute ``count`` layers of a container at once."""
    _check_together(container, count)
    replace_attribute(container, "layers_at_once", count)
    _checkpoint(container, "run_layers")
