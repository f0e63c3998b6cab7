"""LoRA (https://arxiv.org/abs/2106.09685), rsLoRA (https://arxiv.org/abs/2312.03732) and DoRA
(https://arxiv.org/abs/2402.09353) for any module, with the names of Hugging Face ``peft``.

A frozen weight W [out, in] gets two trained factors, A [r, in] and B [out, r]:

    y = W x + scale B A x,    scale = lora_alpha / r,  or  lora_alpha / sqrt(r) with rsLoRA

A is drawn from the parameter's global name, so that every layout and plain Lightning begin alike. B
is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from megatron_lightning.compat import avoid_fused_inference
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import (
    ALL_ROWS,
    Adapters,
    LowRankAdapter,
    adapted_layers,
    attach,
)
from megatron_lightning.layers.adapters.magnitude import fill_magnitudes
from megatron_lightning.layers.adapters.stacked_adapters import StackedAdapters, attach_stacked
from megatron_lightning.layers.adapters.weight_adapters import add_to_weight
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.ties import shared_names
from megatron_lightning.parallel.shards.transposed import is_transposed
from megatron_lightning.peft.heads import heads_of, task_of
from megatron_lightning.peft.matching import (
    check_table,
    ends_of,
    find_parameters,
    find_saved,
    find_targets,
    is_divided,
    saved_names,
    short_names,
    short_parameters,
    value_of,
)
from megatron_lightning.precision.qlora.base_formats import BaseFormat, check_format
from megatron_lightning.precision.qlora.frozen_base import quantize_base
from megatron_lightning.precision.served.gemm import ServedGemm
from megatron_lightning.precision.served.qat import qat_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)
APPLIED = "_megatron_lora"
"""Attribute of a module after LoRA was applied."""
PARTS: Mapping[int, tuple[str, ...]] = {
    2: ("gate", "up"),
    3: ("q", "k", "v"),
    4: ("q", "gate", "k", "v"),
}
"""Number of the matrices in a fused weight -> their names."""


class FusedRows(NamedTuple):
    """Rows of the matrices in a fused weight, repeated ``num_periods`` times."""

    rows: tuple[int, ...]
    num_periods: int


class AppliedLoRA(NamedTuple):
    """Record of an applied LoRA, kept on the module and in checkpoints."""

    lora: LoRA
    targets: tuple[str, ...]
    """Names of the adapted layers: last segments of paths if all layers of the name are adapted,
    else paths."""
    fused: dict[str, FusedRows]
    """Path of a layer with a single adapter for several matrices -> rows of the matrices."""
    saved: tuple[str, ...] = ()
    """Names of the parameters and saved buffers of ``modules_to_save``."""
    ties: Mapping[str, str] = MappingProxyType({})
    """Further name -> first name of the saved parameters with several names."""
    modules: tuple[str, ...] = ()
    """Ends of the paths of the saved modules, which ``peft`` finds by."""
    task: str | None = None
    """``task_type`` of the model in ``peft``."""
    imported: bool = False
    """Whether ranks and scales are those of a folder of ``peft``, imported as a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters of a model's linear layers. All other parameters are frozen.

    The fields follow ``peft.LoraConfig``.

    Raises:
        ConfigError: If a value cannot be.
    """

    r: int = 8
    """Rank: features between the two factors."""
    lora_alpha: float = 16.0
    """The adapters' output is multiplied by lora_alpha / r."""
    lora_dropout: float = 0.0
    """Probability of a zero in the adapters' input."""
    target_modules: str | Sequence[str] = "all-linear"
    """Layers to adapt: "all-linear" (all but the output layer), a list of names or ends of paths
    with ``*`` for any segment, or a regular expression of full paths."""
    target_parameters: Sequence[str] = ()
    """Stacked experts of untouched models to adapt: ends of the paths of parameters [E, out, in],
    such as "experts.gate_up_proj"."""
    exclude_modules: str | Sequence[str] = ()
    """Layers without adapters, in the same form."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Regular expression of the end of a path -> rank in the place of ``r``."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Regular expression of the end of a path -> alpha in the place of ``lora_alpha``."""
    use_rslora: bool = False
    """Divide lora_alpha by sqrt(r) instead of r."""
    use_dora: bool = False
    """Train the lengths of the adapted weights' rows beside the adapters (DoRA)."""
    modules_to_save: Sequence[str] = ()
    """Modules trained in full, such as the output layer, and saved with the adapters. Heads of
    classifiers, and modules that the model's folder lacks, are trained without being named."""
    fused: Literal["parts", "one"] = "parts"
    """Adapters of a weight of several matrices (query, key, value; gate, up): "parts" has an
    adapter for each matrix, as in models of ``transformers``. "one" has a single adapter for all
    matrices, with fewer parameters."""
    base: BaseFormat | None = None
    """Format of the frozen weights of linear layers and experts: "nvfp4", "mxfp8" or "blockwise"
    keep quantized data and scales (QLoRA). None keeps the model's own values."""

    def __post_init__(self) -> None:
        ranks = {"r": self.r, **{f"rank_pattern[{k!r}]": v for k, v in self.rank_pattern.items()}}
        for name, rank in ranks.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise ConfigError(f"{name} of LoRA is {rank!r}; must be a positive integer.")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(
                f"lora_dropout is {self.lora_dropout}; must be a probability below 1. Set 0 for "
                "none."
            )
        if self.use_dora and self.lora_dropout:
            raise ConfigError(
                f"lora_dropout is {self.lora_dropout} beside use_dora=True, and adapters with "
                "trained lengths of rows have none here. Set lora_dropout to 0."
            )
        if self.fused not in ("parts", "one"):
            raise ConfigError(f'fused of LoRA is {self.fused!r}. Set "parts" or "one".')
        check_format(self.base)
        if isinstance(self.modules_to_save, str):
            raise ConfigError(
                f"modules_to_save is the text {self.modules_to_save!r}. Set a list of names."
            )

    def apply(self, module: ModuleT) -> ModuleT:
        """Freeze ``module`` and attach adapters to the module's layers, in place. Return the
        module.

        Call ``apply`` before the strategy divides the module: in ``configure_model``.

        Raises:
            ConfigError: If a name matches nothing, the module has adapters already, or ranks hold
                shards of the module.
        """
        _check_module(module)
        saved = find_saved(module, self.modules_to_save, heads_of(module))
        stacks = find_parameters(module, self.target_parameters, saved)
        targets: dict[str, nn.Module] = {}
        if self.target_modules or not stacks:
            targets = find_targets(module, self.target_modules, self.exclude_modules, saved)
        for name in ("rank_pattern", "alpha_pattern"):
            check_table(name, getattr(self, name), [*targets, *stacks])
        grouped = [path for path, layer in targets.items() if isinstance(layer, GroupedLinear)]
        experts = [*grouped, *stacks]
        if experts and self.lora_dropout:
            raise ConfigError(
                f"lora_dropout is {self.lora_dropout}, and {experts[0]} is a layer of experts, "
                "whose adapters have none (nor do those of peft). Set lora_dropout to 0, or leave "
                "the experts out by exclude_modules."
            )
        if self.use_dora:
            _check_rows(targets)
        # Everything is frozen first. Adapters and saved modules are then trained, and the rest of
        # the base is quantized. Lengths of rows belong to the values that layers compute with.
        module.requires_grad_(False)
        if qat_of(module):
            self.check_rounded()
        for path, layer in targets.items():
            adapters = self._adapters(path, layer)
            attach(layer, adapters)
            if isinstance(getattr(layer, "gemm", None), ServedGemm):
                add_to_weight(layer, adapters)
        for path, layer in _owners(module, stacks).items():
            attach_stacked(layer, self._stacked(path, layer, stacks))
        for child in saved.values():
            child.requires_grad_(True)
        if self.base is not None:
            quantize_base(module, self.base)
        fill_magnitudes(module)
        avoid_fused_inference(module)
        module.__dict__["expects_gradients"] = True  # unused adapters are an error
        fused = {
            path: rows
            for path, layer in targets.items()
            if (rows := _fused_rows(layer)) is not None and self._has_one(layer)
        }
        names = tuple(saved_names(saved))
        module.__dict__[APPLIED] = AppliedLoRA(
            self,
            (*short_names(module, targets), *short_parameters(module, stacks)),
            fused,
            names,
            {
                name: owner
                for owner, *others in shared_names(module)
                for name in others
                if name in names
            },
            ends_of(module, saved),
            task_of(module),
        )
        return module

    def check_rounded(self) -> None:
        """Check that adapters can be added to weights that a forward rounds (``qat``).

        Raises:
            ConfigError: Naming an option that cannot.
        """
        reasons = {
            "lora_dropout": "drops numbers of an input that the sum W + scale B A does not have",
            "base": "rounds W, and rounding the sum again would lose about all that adapters learn",
            "use_dora": "gives the rows of the sum other lengths",
        }
        for name, reason in reasons.items():
            if value := getattr(self, name):
                raise ConfigError(
                    f"{name} of LoRA is {value!r} beside qat: it {reason}. Leave {name} out, or "
                    "train without qat."
                )

    def scale_of(self, path: str) -> float:
        """Return the factor of the adapters' output of the layer at ``path``."""
        rank = self.rank_of(path)
        alpha = value_of(path, self.alpha_pattern, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapters of the layer at ``path``."""
        return value_of(path, self.rank_pattern, self.r)

    def _adapters(self, path: str, layer: nn.Module) -> Adapters:
        """Return the adapters of the layer at ``path``."""
        fused = _fused_rows(layer)
        if fused is None or self._has_one(layer):
            return Adapters({ALL_ROWS: self._adapter(path, layer, _num_rows(layer))}, path)
        parts = {
            name: self._adapter(path, layer, fused.num_periods * size)
            for name, size in zip(PARTS[len(fused.rows)], fused.rows, strict=True)
        }
        alternates = len(fused.rows) > 2
        return Adapters(parts, path, num_groups=fused.num_periods if alternates else 0)

    def _stacked(
        self, path: str, owner: nn.Module, stacks: Mapping[str, nn.Parameter]
    ) -> StackedAdapters:
        """Return the adapters of the parameters of the module of experts at ``path``."""
        parts = {}
        for full_name, stack in stacks.items():
            if full_name.rpartition(".")[0] != path:
                continue
            num_experts, out, inputs = stack.shape
            rank = self.rank_of(full_name)
            sizes = ((inputs, rank), (rank, out))
            factors = [_grouped(num_experts, *size, stack) for size in sizes]
            name = full_name.rpartition(".")[2]
            parts[name] = LowRankAdapter(*factors, scale=self.scale_of(full_name))
        return StackedAdapters(parts, path)

    def _has_one(self, layer: nn.Module) -> bool:
        """Return whether a layer has a single adapter, regardless of the matrices in the weight."""
        return self.fused == "one" or isinstance(layer, GroupedLinear)

    def _adapter(self, path: str, layer: nn.Module, out: int) -> LowRankAdapter:
        """Return an adapter with ``out`` output features."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        rank = self.rank_of(path)
        inputs = weight.shape[0] if is_transposed(layer) else weight.shape[-1]
        factors = [_factor(layer, *sizes) for sizes in ((inputs, rank), (rank, out))]
        return LowRankAdapter(
            *factors,
            scale=self.scale_of(path),
            dropout=self.lora_dropout,
            lora_magnitude=_factor(layer, 1, out) if self.use_dora else None,
        )


def _check_module(module: nn.Module) -> None:
    """Check that a module is full, and has no adapters.

    Raises:
        ConfigError: If not.
    """
    if any(map(is_divided, module.modules())):
        raise ConfigError(
            f"LoRA is applied to a {type(module).__name__} whose weights are divided over "
            "ranks already, so that every rank would train adapters of its own. Apply it in "
            "configure_model, before the strategy divides the module."
        )
    if adapted_layers(module):
        raise ConfigError(
            f"{type(module).__name__} has adapters already, and LoRA is applied again. Apply "
            "it once; several sets of adapters of one model are not supported."
        )


def _check_rows(targets: Mapping[str, nn.Module]) -> None:
    """Check that the rows of adapted weights have lengths that can be trained.

    Raises:
        ConfigError: Naming a layer that cannot have DoRA.
    """
    for path, layer in targets.items():
        if isinstance(layer, GroupedLinear) or is_transposed(layer):
            kind = "experts" if isinstance(layer, GroupedLinear) else "GPT-2's Conv1D"
            raise ConfigError(
                f"use_dora is True, and {path} is a layer of {kind}, which has plain LoRA only. "
                "Leave it out by exclude_modules, or set use_dora to False."
            )


def _num_rows(layer: nn.Module) -> int:
    """Return the output features of a layer."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.shape[-1] if is_transposed(layer) else weight.shape[-2]


def _fused_rows(layer: nn.Module) -> FusedRows | None:
    """Return the rows of the matrices in a layer's weight. None: the weight is a single matrix."""
    rows: tuple[int, ...] = tuple(getattr(layer, "fused_rows", ()))
    return FusedRows(rows, _num_rows(layer) // sum(rows)) if len(rows) in PARTS else None


def _factor(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Return a factor of a layer's adapters, without values: a linear layer, or a linear layer for
    each expert.
    """
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, GroupedLinear):
        return _grouped(len(weight), inputs, outputs, weight, one_by_one=layer.gemm.one_by_one)
    factor = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    return factor.to_empty(device=weight.device)


def _grouped(
    num_experts: int, inputs: int, outputs: int, like: torch.Tensor, *, one_by_one: bool = False
) -> nn.Module:
    """Return a linear layer for each expert without values, with dtype and device of ``like``."""
    with torch.device("meta"):
        layer = GroupedLinear(num_experts, inputs, outputs, bias=False, one_by_one=one_by_one)
    return layer.to(like.dtype).to_empty(device=like.device)


def _owners(module: nn.Module, stacks: Mapping[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Return path -> module of the experts with adapted parameters."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in stacks)
    return {path: module.get_submodule(path) for path in paths}


def applied_to(module: nn.Module) -> dict[str, AppliedLoRA]:
    """Return path -> record of the modules with an applied LoRA."""
    records: dict[str, Any] = {path: vars(m).get(APPLIED) for path, m in module.named_modules()}
    return {path: applied for path, applied in records.items() if applied is not None}
