"""Activation recomputation and offload for any model, by the paths of its modules.

Three ways to keep less for the backward pass (https://arxiv.org/abs/1604.06174; selective: https://arxiv.org/abs/2205.05198):

- a module, or a run of layers, is *checkpointed*: it keeps its inputs only, and its forward runs again in backward;
- the *output* of a norm or an activation function is dropped: whoever saves it for backward keeps how it is computed instead.
  (To checkpoint such a module would win nothing: the layer after it saves the output as its own input.);
- what a module saves is *offloaded* to the host's memory, and fetched back when backward wants it.

Each replaces ``forward`` on the module itself, so that names, parameters, hooks and checkpoints stay as they are. The second
run draws the same random numbers, from the default generator and from the named streams, under the autocast of the first. It
runs once for a backward pass, whatever the schedule: a put-off weight gradient has its inputs already. Losses and gradients
are bit-equal to those without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_lightning.compat import saved_tensors_hooks_in_force
from megatron_lightning.config import RecomputeOptions
from megatron_lightning.errors import ConfigError, RecomputeError
from megatron_lightning.layers.offload import offloaded
from megatron_lightning.parallel.rng import RngStreams
from megatron_lightning.parallel.sharding import compile_pattern

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("**.core_attention",),
    "layernorm": ("**.input_layernorm", "**.pre_mlp_layernorm"),
}
_CHEAP = (nn.LayerNorm, nn.RMSNorm, nn.SiLU, nn.GELU, nn.ReLU)
_OURS = "_megatron_recompute"

Forward = Callable[..., Any]


def apply_recompute(
    module: nn.Module,
    options: RecomputeOptions,
    *,
    stages: Sequence[Sequence[str]] = (),
) -> None:
    """Let the modules that ``options`` names keep less for the backward pass, in place of what an earlier call set.

    Args:
        module: The whole module, or this rank's part, parallelized.
        options: What to do.
        stages: Paths of the units of each pipeline stage that this rank holds; empty: the module is one stage.

    Raises:
        ConfigError: If layers are to be recomputed together that no container runs together.
    """
    remove_recompute(module)
    if options.recompute_granularity == "selective":
        for path in _outermost(module, options.recompute_modules):
            if _is_cheap(module.get_submodule(path)):
                _drop_output(module, path)
            else:
                _checkpoint(module.get_submodule(path), "forward")
    elif options.recompute_granularity == "full":
        _checkpoint_layers(module, options, stages)
    for path in _outermost(module, options.offload_modules):
        _replace(module.get_submodule(path), "forward", partial(offloaded, min_bytes=options.offload_min_bytes))


def remove_recompute(module: nn.Module) -> None:
    """Undo :func:`apply_recompute`."""
    for child in module.modules():
        for name, value in child.__dict__.pop(_OURS, {}).items():
            if value is None:
                child.__dict__.pop(name, None)
            else:
                child.__dict__[name] = value


def check_patterns(module: nn.Module, options: RecomputeOptions) -> None:
    """Check, on the whole module, that every name and pattern means something.

    Raises:
        ConfigError: Naming the one that matches no module.
    """
    asked = {"offload_modules": options.offload_modules}
    if options.recompute_granularity == "selective":
        asked["recompute_modules"] = options.recompute_modules
    for option, patterns in asked.items():
        for pattern in patterns:
            if not any(_outermost(module, [pattern])):
                raise ConfigError(
                    f"{pattern!r} of {option} matches no module of {type(module).__name__}.{_similar(pattern, module)} Name a "
                    "module as its parent does, or give a pattern of its path, in which ** stands for any number of segments."
                )
    if options.recompute_granularity != "full":
        return
    layers = list(_outermost(module, options.recompute_layers))
    if not layers:
        lists = [path for path, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
        there = f" It has lists of modules at {', '.join(map(repr, lists))}." if lists else ""
        raise ConfigError(
            f"recompute_layers={list(options.recompute_layers)} match no module of {type(module).__name__}.{there} Set the "
            f'pattern of the paths of its layers, such as "{lists[0] if lists else "**.blocks"}.*".'
        )
    if options.recompute_method == "uniform" and (options.recompute_num_layers or 1) > 1:
        for path in _containers(layers):
            _check_together(module.get_submodule(path), options.recompute_num_layers)


def _similar(pattern: str, module: nn.Module) -> str:
    """Return what the modules are called, the name that was meant first."""
    names = dict.fromkeys(path.rpartition(".")[2] for path, _ in module.named_modules())
    names.update(dict.fromkeys(alias for alias in _ALIASES if any(_outermost(module, [alias]))))
    known = [name for name in names if name and not name.isdecimal()]
    if not known:
        return ""
    last = pattern.rpartition(".")[2]
    [*nearest] = get_close_matches(last, known, n=1)
    meant = f" Did you mean {nearest[0]!r}?" if nearest and nearest[0] != last else ""
    return f"{meant} Its modules are called {', '.join(known[:20])}{', …' if len(known) > 20 else ''}."


class _Wrapper(Protocol):
    def __call__(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any: ...


def _replace(module: nn.Module, name: str, wrapper: _Wrapper) -> None:
    """Put ``wrapper`` around a method of ``module``; an attribute of the instance, which copying and pickling keep whole."""
    attributes = module.__dict__
    attributes.setdefault(_OURS, {}).setdefault(name, attributes.get(name))
    attributes[name] = partial(wrapper, getattr(module, name))


def _outermost(module: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yield the paths that match, but not those inside one that does."""
    spelled = [pattern for name in names for pattern in _ALIASES.get(name, (name if "." in name else f"**.{name}", name))]
    patterns = [compile_pattern(pattern) for pattern in spelled]
    last = None
    for path, _ in module.named_modules():
        if (last is None or not path.startswith(f"{last}.")) and any(pattern.fullmatch(path) for pattern in patterns):
            last = path
            yield path


def _is_cheap(module: nn.Module) -> bool:
    return isinstance(module, _CHEAP) or type(module).__name__.endswith("Norm")


# ------------------------------------------------------------------------------------------------- checkpointed modules


def _checkpoint(module: nn.Module, name: str) -> None:
    """Let a method of ``module`` be recomputed."""
    drawing = tuple(child for child in module.modules() if isinstance(getattr(child, "streams", None), RngStreams))
    _replace(module, name, partial(_checkpointed, drawing=drawing))


def _checkpointed(forward: Forward, /, *args: Any, drawing: Sequence[Any], **kwargs: Any) -> Any:
    """Run ``forward`` and keep its inputs only; ``drawing`` are the modules in it that have named random streams."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        forward, args = _with_distinct(forward, args)
    streams = next((child.streams for child in drawing if getattr(child, "active_p", True)), None)
    if streams is None:  # torch.compile knows this form alone, and takes it into the compiled layer
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_replaying, streams), **kwargs)


def _with_distinct(forward: Forward, args: tuple[Any, ...]) -> tuple[Forward, tuple[Any, ...]]:
    """Return what runs ``forward`` on the distinct ones of ``args``, and those.

    Hooks around a checkpoint give back a tensor for each that was saved, so that query, key and value would no longer be one,
    and attention would take another way in the second run.
    """
    distinct = {id(value): value for value in args}
    if len(distinct) == len(args):
        return forward, args
    index = {identity: number for number, identity in enumerate(distinct)}
    places = [index[id(value)] for value in args]

    def run(*values: Any, **kwargs: Any) -> Any:
        return forward(*(values[place] for place in places), **kwargs)

    return run, tuple(distinct.values())


def _replaying(streams: RngStreams) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what the first and the second run happen in."""
    return nullcontext(), streams.replay()


def _checkpoint_layers(module: nn.Module, options: RecomputeOptions, stages: Sequence[Sequence[str]]) -> None:
    layers, count = list(_outermost(module, options.recompute_layers)), options.recompute_num_layers or 1
    if options.recompute_method == "uniform" and count > 1:
        for path in _containers(layers):
            _checkpoint_together(module.get_submodule(path), count)
        return
    if options.recompute_method == "block":
        layers = [path for stage in stages or [layers] for path in [path for path in layers if path in set(stage)][:count]]
    for path in layers:
        _checkpoint(module.get_submodule(path), "forward")


def _containers(layers: Sequence[str]) -> Iterator[str]:
    """Yield the paths of the modules whose attributes are the lists of these layers."""
    yield from dict.fromkeys(path.rpartition(".")[0].rpartition(".")[0] for path in layers)


def _check_together(container: nn.Module, count: int | None) -> None:
    if not hasattr(container, "layers_at_once"):
        raise ConfigError(
            f"recompute_method=uniform with recompute_num_layers={count}, and {type(container).__name__} runs its layers one "
            "by one. Set recompute_num_layers to 1, or give it layers_at_once and run_layers(layers, …) like TransformerBlock."
        )


def _checkpoint_together(container: nn.Module, count: int) -> None:
    """Let the container of layers recompute ``count`` of them at once."""
    _check_together(container, count)
    container.__dict__.setdefault(_OURS, {}).setdefault("layers_at_once", container.layers_at_once)
    container.layers_at_once = count  # type: ignore[assignment]
    _checkpoint(container, "run_layers")


# ------------------------------------------------------------------------------------------------------ dropped outputs


@dataclass(frozen=True)
class _Packed:
    """A tensor as the hooks around ours have packed it, or as it is."""

    value: Any
    unpack: Callable[[Any], Tensor] | None

    def tensor(self) -> Tensor:
        tensor: Tensor = self.value if self.unpack is None else self.unpack(self.value)
        return tensor


@dataclass(frozen=True)
class _Recipe:
    """Stands for a dropped output in the graph."""

    forward: Forward
    inputs: tuple[_Packed, ...]
    versions: tuple[tuple[Tensor, int], ...]
    """Inputs that hooks left alone, and how often they had been changed."""
    autocast: tuple[str, bool, torch.dtype]
    view: tuple[Sequence[int], Sequence[int], int] | None = None
    """Size, stride and offset of what is wanted of the output."""

    def tensor(self) -> Tensor:
        if any(value._version != version for value, version in self.versions):
            raise RecomputeError(
                "the input of a module whose output is computed again was changed in place since. Change a copy of it, or take "
                "the module out of recompute_modules."
            )
        device, enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled):
            output: Tensor = self.forward(*(packed.tensor() for packed in self.inputs))
        return output if self.view is None else output.as_strided(*self.view)


class _DroppedOutputs:
    """Recipes of the outputs that are alive in one forward pass of the modules' parent, by where they lie in memory.

    Hooks that were in force before, such as those of an offloaded parent, see all other tensors.
    """

    def __init__(self) -> None:
        self._recipes: dict[tuple[Any, ...], _Recipe] = {}
        self._outer = saved_tensors_hooks_in_force()

    def note(self, output: Tensor, forward: Forward, inputs: Sequence[Tensor]) -> None:
        """Remember how ``output`` is computed while it is alive."""
        if output.untyped_storage().nbytes() != output.nbytes:  # a part of something else, which others may keep
            return
        device, place = output.device.type, _place(output)
        values = [value.detach() for value in inputs]
        self._recipes[place] = _Recipe(
            forward,
            tuple(map(self._keep, values)),
            () if self._outer else tuple((value, value._version) for value in values),
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )
        weakref.finalize(output, self._recipes.pop, place, None)  # other tensors may lie there afterwards

    def pack(self, tensor: Tensor) -> _Packed | _Recipe:
        """Return what stands for a tensor that is saved: a dropped output, whole or as a view, or any other."""
        recipe = self._recipes.get(_place(tensor))
        if recipe is None:
            return self._keep(tensor)
        return replace(recipe, view=(tensor.shape, tensor.stride(), int(tensor.storage_offset())))

    def _keep(self, tensor: Tensor) -> _Packed:
        return _Packed(tensor, None) if self._outer is None else _Packed(self._outer[0](tensor), self._outer[1])

    @staticmethod
    def unpack(packed: _Packed | _Recipe) -> Tensor:
        """Return the tensor."""
        return packed.tensor()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor._version


def _drop_output(module: nn.Module, path: str) -> None:
    """Let those who save the output of ``path`` during its parent's forward keep how it is computed."""
    parent = module.get_submodule(path.rpartition(".")[0])
    dropping: _Dropping | None = parent.__dict__.get("_dropped_outputs")
    if dropping is None:
        parent.__dict__.setdefault(_OURS, {})["_dropped_outputs"] = None
        dropping = parent.__dict__["_dropped_outputs"] = _Dropping()
        _replace(parent, "forward", dropping.around)
    _replace(module.get_submodule(path), "forward", dropping.computed)


class _Dropping:
    """The outputs dropped inside one module; plain state of one forward pass, which a copy of the module begins without."""

    def __init__(self) -> None:
        self._running: list[_DroppedOutputs] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dropping:
        copy = memo[id(self)] = _Dropping()
        return copy

    def __reduce__(self) -> tuple[type[_Dropping], tuple[()]]:
        return _Dropping, ()

    def around(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run the parent's forward."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler decides itself what to keep
            return forward(*args, **kwargs)
        outputs = _DroppedOutputs()
        self._running.append(outputs)
        try:
            with saved_tensors_hooks(outputs.pack, outputs.unpack):
                return forward(*args, **kwargs)
        finally:
            self._running.pop()

    def computed(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward and take note of its output."""
        output = forward(*args, **kwargs)
        if self._running and not kwargs and torch.is_grad_enabled() and all(isinstance(value, Tensor) for value in args):
            self._running[-1].note(output, forward, args)
        return output
