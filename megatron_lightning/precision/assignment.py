"""Assign a recipe's GEMMs to the layers of a module.

Linear layers (plain and parallel) and experts can be quantized. By default all are, except output
layers and routers, because their errors go straight into the loss and into the choice of experts.
Only ``layer.gemm`` is set, and the class of a plain ``nn.Linear``, because ``nn.Linear`` has no
replaceable GEMM. Names, parameters and checkpoints stay unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adaptable import adapt, adaptable_class, restore
from megatron_lightning.layers.linear.gemm import Gemm
from megatron_lightning.layers.linear.parallel_linear import VocabParallelLinear
from megatron_lightning.layers.linear.splittable import Splittable
from megatron_lightning.layers.linear.transposed import (
    TransposedColumnParallelLinear,
    TransposedRowParallelLinear,
)
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.attachments import Attachment, is_wrapper
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.parallel.shards.patterns import compile_pattern, describe_unused
from megatron_lightning.precision.backends import Chosen
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.native import NativeGemm
from megatron_lightning.precision.recipes import FP8Recipe

if TYPE_CHECKING:
    from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext

_IN_BF16 = (
    "**output_layer", "**head", "**score", "**classifier", "**qa_outputs",
    "**router", "**gate",
)  # fmt: skip
"""Paths of output layers and routers in common models."""
_PEFT_FACTORS = ("lora_A", "lora_B")
_GEMMS: Mapping[Chosen, type[EmulatedGemm]] = {"emulation": EmulatedGemm, "native": NativeGemm}


@dataclass(frozen=True)
class Assignment:
    """Quantized and other layers in a rank's part."""

    quantized: dict[str, EmulatedGemm]
    """Layer path -> GEMMs of the layer."""
    in_bf16: list[str]
    """Paths of the linear layers that the recipe leaves in bf16."""
    others: list[str]
    """Paths of modules with matrices of their own that cannot be quantized."""

    def describe(self) -> str:
        """Return a sentence for the log."""
        kinds: dict[str, int] = {}
        for gemm in self.quantized.values():
            kinds[gemm.recipe.scaling] = kinds.get(gemm.recipe.scaling, 0) + 1
        counts = ", ".join(f"{count} by {scaling}" for scaling, count in kinds.items()) or "none"
        return (
            f"quantized layers on this rank: {counts}. In bf16: {_listed(self.in_bf16)}."
            f"{f' Cannot be quantized: {_listed(self.others)}.' if self.others else ''}"
        )


def _listed(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" * (len(names) > 4))) or "none"


def apply_recipe(
    module: nn.Module,
    recipe: FP8Recipe,
    context: ParallelContext | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: Chosen = "emulation",
) -> Assignment:
    """Quantize the layers of ``module`` named by ``recipe``. :func:`remove_recipe` undoes the call.

    Args:
        module: The full module, or this rank's part.
        recipe: The recipe.
        context: Groups of this rank. None: the module is full.
        dtype: Dtype of the GEMMs' results.
        backend: The multiplying backend.

    Raises:
        ConfigError: If a pattern matches nothing, or no layer is quantized.
    """
    recipes = recipes_of_layers(module, recipe)
    modules = dict(present_modules(module))
    quantized = {
        path: _quantize(modules[path], layer_recipe, context, dtype, _GEMMS[backend])
        for path, layer_recipe in recipes.items()
        if layer_recipe is not None and path in modules
    }
    in_bf16 = [path for path in recipes if path in modules and path not in quantized]
    return Assignment(quantized, in_bf16, _others(modules, recipes))


def recipes_of_layers(
    module: nn.Module, recipe: FP8Recipe, *, will_divide: bool = False
) -> dict[str, FP8Recipe | None]:
    """Return the recipe of every linear layer by path, including layers on other pipeline ranks.

    None: bf16.

    Args:
        module: The full module, or this rank's part.
        recipe: The recipe.
        will_divide: Whether parallel layers will still replace layers. A replacement can be
            quantized even if the original cannot (``Conv1D``).

    Raises:
        ConfigError: If a pattern matches nothing, or no layer is quantized.
    """
    paths = [path for path, _ in module.named_modules() if path]
    unused_patterns = describe_unused(list(recipe.modules), paths)
    if unused_patterns:
        raise ConfigError(
            f"modules of the recipe has patterns that match no module of "
            f"{type(module).__name__}: {'; '.join(unused_patterns)}. Correct or remove them."
        )
    kept_paths = (*_kept_layers(module, recipe), *_output_embeddings(module))
    layers = _linears(module)
    # Patterns decide first, then the kept layers, then the recipe itself.
    recipes = {path: _recipe_of(path, layer, recipe, kept_paths) for path, layer in layers.items()}
    other_layers = [] if any(recipes.values()) else _others(dict(module.named_modules()), recipes)
    if not any(recipes.values()) and not (will_divide and other_layers):
        unlike = (
            f" and others, which cannot be quantized: {_listed(other_layers)}"
            if other_layers
            else ""
        )
        raise ConfigError(
            f"the recipe quantizes no layer of {type(module).__name__}, which has "
            f"{len(recipes)} linear layers{unlike}. Remove the plugin, or what excludes them: rows "
            "of modules, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16."
        )
    return recipes


def quantizable_layers(module: nn.Module) -> list[str]:
    """Return the paths of the layers that a recipe quantizes by default."""
    kept_paths, recipe = tuple(_output_embeddings(module)), FP8Recipe()
    layers = _linears(module).items()
    return [
        path for path, layer in layers if _recipe_of(path, layer, recipe, kept_paths) is not None
    ]


def _others(modules: Mapping[str, nn.Module], found: Collection[str]) -> list[str]:
    """Return the paths of modules with matrices of their own outside ``found``.

    Embeddings do not multiply and are left out.
    """
    prefixes = _adapters_in(modules)
    return [
        path
        for path, child in modules.items()
        if path not in found
        and not path.startswith(prefixes)
        and not isinstance(child, nn.Embedding)
        and not hasattr(child, "gemm")
        and any(p.ndim > 1 for p in child.parameters(recurse=False))
    ]


def remove_recipe(module: nn.Module) -> None:
    """Undo :func:`apply_recipe`."""
    for child in module.modules():
        gemm = vars(child).get("gemm")
        if isinstance(gemm, EmulatedGemm):
            restore(child, "gemm")
            if gemm.one_by_one:
                adapt(child, gemm=Gemm(one_by_one=True))


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can be quantized, including layers on other pipeline ranks."""
    kinds = (Splittable, TransposedColumnParallelLinear, TransposedRowParallelLinear)
    return {
        path: child
        for path, child in _without_adapters(module)
        if issubclass(adaptable_class(type(child)), kinds)
    }


def _without_adapters(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of everything except adapters.

    The rank of a low-rank factor is too small for scales.
    """
    modules = dict(module.named_modules())
    prefixes = _adapters_in(modules)
    return (item for item in modules.items() if not item[0].startswith(prefixes))


def _adapters_in(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the path prefixes of adapters, each with a trailing dot."""
    return tuple(
        f"{path}."
        for path, child in modules.items()
        if isinstance(child, Attachment)
        or (
            path.rpartition(".")[2] in _PEFT_FACTORS
            and is_wrapper(modules[path.rpartition(".")[0]])
        )
    )


def _recipe_of(
    path: str, layer: nn.Module, recipe: FP8Recipe, kept: tuple[str, ...]
) -> FP8Recipe | None:
    """Return the recipe of a layer, or None for bf16."""
    for pattern, row in recipe.rows.items():
        if compile_pattern(pattern).fullmatch(path):
            return row
    if isinstance(layer, VocabParallelLinear):
        return None
    if any(compile_pattern(pattern).fullmatch(path) for pattern in _IN_BF16):
        return None
    return None if f"{path}.".startswith(kept) else recipe


def _output_embeddings(module: nn.Module) -> list[str]:
    """Return the paths, with a trailing dot, of the output layers named by models of transformers.

    Output layers of other pipeline ranks may be missing.
    """
    ids = set[int]()
    for child in module.modules():
        try:
            ids.add(id(child.get_output_embeddings()))  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
    return [f"{path}." for path, child in module.named_modules() if id(child) in ids]


def _kept_layers(module: nn.Module, recipe: FP8Recipe) -> tuple[str, ...]:
    """Return the paths, with a trailing dot, of the first and last layers that stay in bf16.

    Layers are the entries of the longest module list with numeric keys outside other lists (a
    layer's experts are inside a list). On a pipeline rank the list keeps the entries of all ranks.
    """
    first, last = recipe.num_layers_at_start_in_bf16, recipe.num_layers_at_end_in_bf16
    if not first + last:
        return ()
    kinds = nn.ModuleList | nn.ModuleDict
    lists = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, kinds) and all(name.isdecimal() for name in child._modules)
    }
    if not lists:
        raise ConfigError(
            f"num_layers_at_start_in_bf16={first} and num_layers_at_end_in_bf16={last}, and "
            f"{type(module).__name__} has no list of layers. Name them in modules of the recipe: "
            '{"path.of.layer.**": "bf16"}.'
        )
    # The layers of a model are the longest list that is not inside of another. A tie has no answer.
    inner = tuple(f"{path}." for path in lists)
    outer = {path: child for path, child in lists.items() if not path.startswith(inner)}
    length = max(len(child) for child in outer.values())
    (path, layers), *other_lists = (
        (p, child) for p, child in outer.items() if len(child) == length
    )
    if other_lists:
        listed = ", ".join([path, *(other_path for other_path, _ in other_lists)])
        raise ConfigError(
            f"num_layers_at_start_in_bf16={first} and num_layers_at_end_in_bf16={last}, and "
            f"{type(module).__name__} has {len(other_lists) + 1} lists of {length} layers: "
            f"{listed}. "
            f'Name the layers in modules of the recipe: {{"{path}.0.**": "bf16"}}.'
        )
    names = list(layers._modules)
    chosen = [*names[:first], *names[max(0, len(names) - last) :]]
    return tuple(f"{path}.{name}." for name in chosen)


def _quantize(
    layer: nn.Module,
    recipe: FP8Recipe,
    context: ParallelContext | None,
    dtype: torch.dtype,
    kind: type[EmulatedGemm],
) -> EmulatedGemm:
    group = _sharing(layer, context)
    streams = None if context is None else context.rng
    one_by_one = layer.gemm.one_by_one if isinstance(layer, GroupedLinear) else False
    gemm = kind(recipe, dtype=dtype, group=group, streams=streams, one_by_one=one_by_one)
    adapt(layer, gemm=gemm)
    return gemm


def _sharing(layer: nn.Module, context: ParallelContext | None) -> AxisGroup | None:
    """Return the ranks with shards of the layer's tensors. None: only this rank."""
    if context is None:
        return None
    group: AxisGroup | None = None
    if isinstance(layer, GroupedLinear):
        group = context.etp
    elif isinstance(getattr(layer, "group", None), type(context.tp)):
        group = layer.group  # type: ignore[assignment]
    elif any("tp" in spec.partial_over for spec in getattr(layer, "shard_specs", {}).values()):
        group = context.tp  # of sequence shards
    return group if group is not None and group.size > 1 else None
