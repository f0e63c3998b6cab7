"""Modules matched by ``target_modules`` and similar options, in the words of ``peft``.

A list holds names or paths. An entry matches the end of a module's path. In our form ``*`` matches
a segment and ``**`` any number of segments. A text is a regular expression of the full path, or
"all-linear".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.stacked_adapters import is_stack
from megatron_lightning.layers.losses.linear_loss import TakesLoss
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.attachments import is_extended, without_attachments
from megatron_lightning.parallel.shards.patterns import compile_pattern, nearest_pattern
from megatron_lightning.parallel.shards.transposed import is_transposed

ALL_LINEAR = "all-linear"
_LISTED = 8
_HEADS = ("score", "classifier")
"""Names of the heads of classifiers in ``transformers``. ``peft`` leaves out these heads, too."""
_Value = TypeVar("_Value")


def adaptable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return path -> layer of all adaptable linear layers.

    Left out are output layers (adapters would have to be part of the loss), and layers whose
    weights torch reads without calling the layer.
    """
    outputs = output_layers(module)
    return {
        path: layer
        for path, layer in without_attachments(module)
        if is_linear(layer) and path and id(layer) not in outputs and not is_extended(layer)
    }


def is_linear(layer: nn.Module) -> bool:
    """Return whether a module is a linear layer: of torch, of experts, or with the weight
    transposed (``Conv1D`` of ``transformers``).
    """
    if isinstance(layer, GroupedLinear) or is_transposed(layer):
        return True
    # torch's attention reads the weight of this layer without calling the layer.
    return isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)


def is_divided(layer: nn.Module) -> bool:
    """Return whether a layer holds shards of its parameters."""
    specs = getattr(layer, "shard_specs", None) or {}
    return any(spec.local_shape != spec.global_shape for spec in specs.values()) or any(
        isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)
    )


def find_targets(
    module: nn.Module,
    targets: str | Sequence[str],
    excluded: str | Sequence[str],
    saved: Collection[str] = (),
) -> dict[str, nn.Module]:
    """Return path -> layer of the layers to adapt.

    Args:
        module: The full model.
        targets: ``target_modules``.
        excluded: ``exclude_modules``.
        saved: Paths of the modules trained in full, which get no adapters inside.

    Raises:
        ConfigError: If a target or an exclusion matches no linear layer, or nothing is left.
    """
    layers = adaptable_layers(module)
    if targets == ALL_LINEAR:
        chosen = set(layers)
    else:
        chosen = _matching(module, "target_modules", targets, layers)
    left_out = _matching(module, "exclude_modules", excluded, layers) if excluded else set()
    targets_found = {
        path: layer
        for path, layer in layers.items()
        if path in chosen - left_out and not is_inside(path, saved)
    }
    if not targets_found:
        trained = f" and modules_to_save ({', '.join(saved)})" if saved else ""
        raise ConfigError(
            f"target_modules finds no layer to adapt in {type(module).__name__}: "
            f"target_modules={targets!r} match {len(chosen)} of its {len(layers)} linear layers, "
            f"and exclude_modules={excluded!r}{trained} leave out all of them. Change one of them."
        )
    return targets_found


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is one of the modules', or inside a module."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def short_names(module: nn.Module, paths: Collection[str]) -> tuple[str, ...]:
    """Return names of exactly the layers at ``paths``: the last segments of paths if all layers of
    the name are meant, else paths.
    """
    paths_of_name: dict[str, set[str]] = {}
    for path, layer in without_attachments(module):
        if is_linear(layer):
            paths_of_name.setdefault(path.rpartition(".")[2], set()).add(path)
    names = []
    for name, all_paths in paths_of_name.items():
        own_paths = all_paths & set(paths)
        names += [name] if own_paths == all_paths else sorted(own_paths)
    return tuple(names)


def find_parameters(
    module: nn.Module, names: Sequence[str], saved: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Return path -> parameter of the stacked experts of untouched models to adapt, outside of the
    ``saved`` modules.

    Raises:
        ConfigError: If a name matches no stacked experts, or experts are stored [E, in, out].
    """
    if not names:
        return {}
    if isinstance(names, str):
        raise ConfigError(
            f"target_parameters is the text {names!r}. Set a list of names, such as "
            '["experts.gate_up_proj", "experts.down_proj"].'
        )
    stacks = _stacks(module)
    chosen = set[str]()
    # Each name must match, so that a typing error does not leave out a stack.
    for pattern in names:
        matches = {path for path in stacks if _suffix(pattern)(path)}
        if not matches:
            ends = sorted({".".join(path.split(".")[-2:]) for path in stacks})
            hint = f"Stacked experts there are {', '.join(ends)}" if ends else "It has none"
            raise ConfigError(
                f"target_parameters has {pattern!r}, which matches no stacked experts of "
                f"{type(module).__name__}. {hint}: correct the name, or remove it. Other layers "
                "are named in target_modules."
            )
        chosen |= matches
    for path in chosen:
        owner = module.get_submodule(path.rpartition(".")[0])
        if getattr(owner, "is_transposed", False):
            raise ConfigError(
                f"target_parameters matches {path}, and {type(owner).__name__} stores experts as "
                "[inputs, outputs], which adapters do not support. Train GPTLightningModule("
                "init_from_hf=...), whose experts get adapters, or leave it out."
            )
    return {
        path: parameter
        for path, parameter in stacks.items()
        if path in chosen and not is_inside(path, saved)
    }


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return path -> parameter of all stacked experts."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, child in without_attachments(module)
        for name, parameter in child.named_parameters(recurse=False)
        if is_stack(child, name)
    }


def short_parameters(module: nn.Module, paths: Collection[str]) -> tuple[str, ...]:
    """Return names of exactly the stacked experts at ``paths``: the last two segments if all of
    the name are meant, else paths.
    """
    paths_of_name: dict[str, set[str]] = {}
    for path in _stacks(module):
        paths_of_name.setdefault(".".join(path.split(".")[-2:]), set()).add(path)
    names: list[str] = []
    for name, all_paths in paths_of_name.items():
        own_paths = all_paths & set(paths)
        names += [name] if own_paths == all_paths else sorted(own_paths)
    return tuple(names)


def find_saved(
    module: nn.Module, names: Sequence[str], heads: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return path -> module of the modules trained in full (``modules_to_save``).

    Args:
        module: The full model.
        names: ``modules_to_save``.
        heads: Paths of the modules trained without being named.

    Raises:
        ConfigError: If a name matches no module with parameters, or a module shares a parameter
            with an unnamed module.
    """
    modules = {
        path: child
        for path, child in without_attachments(module)
        if path and any(True for _ in child.parameters())
    }
    saved = {*heads}
    if names:
        saved |= _matching(module, "modules_to_save", list(names), modules)
    if not saved:
        return {}
    saved_modules = {path: modules[path] for path in modules if path in saved}
    parameter_ids = {id(p) for child in saved_modules.values() for p in child.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in parameter_ids and not name.startswith(
            tuple(f"{path}." for path in saved_modules)
        ):
            raise ConfigError(
                f"modules_to_save={list(names)!r} trains a parameter that {name} shares (tied "
                f"weights). Name {name.rpartition('.')[0]} in modules_to_save, too, so that both "
                "are saved."
            )
    return saved_modules


def saved_names(saved: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the parameters and saved buffers of modules, each once."""
    names: dict[str, None] = {}
    for path, child in saved.items():
        kept = child.state_dict(keep_vars=True).keys()
        tensors = [*child.named_parameters(), *child.named_buffers()]
        names |= {f"{path}.{name}": None for name, _ in tensors if name in kept}
    yield from names


def ends_of(module: nn.Module, saved: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return ends of the paths of the outermost saved modules, in the form of ``peft``, which takes
    every module whose path ends in the text.
    """
    everywhere = [path for path, _ in module.named_modules()]
    ends = dict[str, None]()
    for path in saved:
        if is_inside(path.rpartition(".")[0], saved):
            continue
        segments = path.split(".")
        texts = [".".join(segments[-n:]) for n in range(1, len(segments) + 1)]
        matches = {text: [other for other in everywhere if other.endswith(text)] for text in texts}
        ends[next((t for t in texts if all(m in saved for m in matches[t])), path)] = None
    return tuple(ends)


def value_of(path: str, table: Mapping[str, _Value], default: _Value) -> _Value:
    """Return the value of a table of ``peft`` (``rank_pattern``, ``alpha_pattern``). The keys are
    regular expressions of the end of a path.
    """
    return next((value for key, value in table.items() if _ends_with(key, path)), default)


def check_table(name: str, table: Mapping[str, object], paths: Iterable[str]) -> None:
    """Check that every key of ``table``, an option called ``name``, matches an adapted layer."""
    paths = list(paths)
    for key in table:
        if not any(_ends_with(key, path) for path in paths):
            raise ConfigError(
                f"{name} has {key!r}, which matches no adapted layer"
                f"{_did_you_mean(key, paths)}. Correct the key, or remove it."
            )


def _ends_with(key: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", path) is not None


def _matching(
    module: nn.Module, option: str, patterns: str | Sequence[str], modules: Mapping[str, nn.Module]
) -> set[str]:
    """Return the paths matched by patterns. Each pattern must match a path.

    Raises:
        ConfigError: Naming the pattern without a match.
    """
    is_text = isinstance(patterns, str)
    chosen = set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = _regular(option, pattern) if is_text else _suffix(pattern)
        paths = {path for path in modules if matches(path)}
        if not paths:
            raise ConfigError(_unmatched(module, option, pattern, modules, is_text=is_text))
        chosen |= paths
    return chosen


def _suffix(pattern: str) -> Callable[[str], bool]:
    path_pattern, suffix_pattern = compile_pattern(pattern), compile_pattern(f"**.{pattern}")
    return lambda path: bool(path_pattern.fullmatch(path) or suffix_pattern.fullmatch(path))


def _regular(option: str, pattern: str) -> Callable[[str], bool]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{option}={pattern!r} is a text, which is a regular expression of paths, and it is "
            f"none ({error}). Set a list of names."
        ) from error
    return lambda path: expression.fullmatch(path) is not None


def _unmatched(
    module: nn.Module,
    option: str,
    pattern: str,
    modules: Mapping[str, nn.Module],
    *,
    is_text: bool,
) -> str:
    """Describe a pattern without a match."""
    matches = re.compile(pattern).fullmatch if is_text else _suffix(pattern)
    # Layers that match and take no adapters are the likelier intention.
    other_paths = [path for path, _ in without_attachments(module) if path and matches(path)]
    if other_paths and option != "modules_to_save":
        kind = type(module.get_submodule(other_paths[0])).__name__
        why = f"{other_paths[0]} is a {kind}"
        if other_paths[0] not in modules and is_linear(module.get_submodule(other_paths[0])):
            why = (
                f"{other_paths[0]} is an output layer, whose adapters would have to be part of the "
                "loss (train it as a whole by modules_to_save)"
            )
        return f"{option} has {pattern!r}, which matches no layer that takes adapters: {why}."
    names = sorted({path.rpartition(".")[2] for path in modules} - {""})
    listed = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
    as_list = f" (a text is a regular expression of the full path; a list is {[pattern]!r})"
    return (
        f"{option} has {pattern!r}, which matches no "
        f"{'module' if option == 'modules_to_save' else 'linear layer'} of "
        f"{type(module).__name__}{as_list if is_text else ''}"
        f"{_did_you_mean(pattern, modules)}. Its layers are called {listed}: correct the name, or "
        "remove it."
    )


def _did_you_mean(pattern: str, paths: Iterable[str]) -> str:
    ends = {path.rpartition(".")[2] for path in paths}
    near = nearest_pattern(pattern, ends if "." not in pattern else list(paths))
    return f" (did you mean {near!r}?)" if near else ""


def output_layers(module: nn.Module) -> set[int]:
    """Return the ids of the layers for logits."""
    ids = set[int]()
    for path, child in module.named_modules():
        if isinstance(child, TakesLoss) or path.rpartition(".")[2] in _HEADS:
            ids.add(id(child))
        find = getattr(child, "get_output_embeddings", None)
        if find is None:
            continue
        try:
            ids.add(id(find()))
        except (AttributeError, NotImplementedError):
            continue
    return ids
