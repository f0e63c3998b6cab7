"""LoRA (https://arxiv.org/abs/2106.09685) and rsLoRA (https://arxiv.org/abs/2312.03732) for any
module, with the names of Hugging Face ``peft``.

A frozen weight W [out, in] gets two trained factors, A [r, in] and B [out, r]:

    y = W x + scale B A x,    scale = lora_alpha / r,  or  lora_alpha / sqrt(r) with rsLoRA

A is drawn from the parameter's global name, so that every layout and plain Lightning begin alike;
B is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from megatron_lightning.compat import avoid_fused_inference
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters import (
    ALL_ROWS,
    Adapters,
    LowRankAdapter,
    adapted_layers,
    attach,
)
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.peft.matching import (
    check_table,
    find_saved,
    find_targets,
    is_transposed,
    value_of,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_RECORD = "_megatron_lora"
_PARTS: Mapping[int, tuple[str, ...]] = {2: ("gate", "up"), 3: ("q", "k", "v")}
"""Number of the matrices in a fused weight -> their names."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters of a model's linear layers; everything else is frozen.

    The fields are those of ``peft.LoraConfig``.

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
    """Layers that get adapters: "all-linear" (all but the output layer); a list of names or ends of
    paths, in which ``*`` matches a segment; or a regular expression of full paths."""
    exclude_modules: str | Sequence[str] = ()
    """Layers that get none, in the same form."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Regular expression of the end of a path -> rank, where it is another."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Regular expression of the end of a path -> lora_alpha, where it is another."""
    use_rslora: bool = False
    """Divide lora_alpha by sqrt(r) instead of r."""
    modules_to_save: Sequence[str] = ()
    """Modules that are trained as they are, such as the output layer, and saved with the
    adapters."""
    fused: Literal["parts", "one"] = "parts"
    """Adapters of a weight that consists of several matrices (query, key, value; gate, up): one for
    each, as in models of ``transformers``, or one for all, with fewer parameters."""

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
        if self.fused not in ("parts", "one"):
            raise ConfigError(f'fused of LoRA is {self.fused!r}. Set "parts" or "one".')
        if isinstance(self.modules_to_save, str):
            raise ConfigError(
                f"modules_to_save is the text {self.modules_to_save!r}. Set a list of names."
            )

    def apply(self, module: ModuleT) -> ModuleT:
        """Freeze ``module`` and attach adapters to its layers, in place; return it.

        Call it before the strategy divides the module: in ``configure_model``.

        Raises:
            ConfigError: If a name matches nothing, or the module has adapters already.
        """
        if adapted_layers(module):
            raise ConfigError(
                f"{type(module).__name__} has adapters already, and LoRA is applied again. Apply "
                "it once; several sets of adapters of one model are not supported."
            )
        targets = find_targets(module, self.target_modules, self.exclude_modules)
        saved = find_saved(module, self.modules_to_save)
        for name in ("rank_pattern", "alpha_pattern"):
            check_table(name, getattr(self, name), targets)
        experts = [path for path, layer in targets.items() if isinstance(layer, GroupedLinear)]
        if experts and self.lora_dropout:
            raise ConfigError(
                f"lora_dropout is {self.lora_dropout}, and {experts[0]} is a layer of experts, "
                "whose adapters have none (nor do those of peft). Set lora_dropout to 0, or leave "
                "the experts out by exclude_modules."
            )
        module.requires_grad_(False)
        for path, layer in targets.items():
            attach(layer, self._adapters(path, layer))
        for child in saved.values():
            child.requires_grad_(True)
        avoid_fused_inference(module)
        module.__dict__[_RECORD] = self
        module.__dict__["expects_gradients"] = True  # adapters that are not read are an error
        return module

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
        rows: tuple[int, ...] = tuple(getattr(layer, "fused_rows", ()))
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        out = weight.shape[-1] if is_transposed(layer) else weight.shape[-2]
        num_periods = out // sum(rows) if rows else 1
        names = _PARTS.get(len(rows), ())
        if self.fused == "one" or not names or isinstance(layer, GroupedLinear):
            return Adapters({ALL_ROWS: self._adapter(path, layer, out)}, path)
        parts = {
            name: self._adapter(path, layer, num_periods * size)
            for name, size in zip(names, rows, strict=True)
        }
        return Adapters(parts, path, num_groups=num_periods if len(rows) == 3 else 0)

    def _adapter(self, path: str, layer: nn.Module, out: int) -> LowRankAdapter:
        """Return an adapter with ``out`` output features."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        rank = self.rank_of(path)
        inputs = weight.shape[0] if is_transposed(layer) else weight.shape[-1]
        factors = [_factor(layer, *sizes) for sizes in ((inputs, rank), (rank, out))]
        return LowRankAdapter(*factors, scale=self.scale_of(path), dropout=self.lora_dropout)


def _factor(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Return a factor of a layer's adapters, without values: one linear layer, or one for each
    expert.
    """
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, GroupedLinear):
        one_by_one = layer.gemm.one_by_one
        with torch.device("meta"):
            factor: nn.Module = GroupedLinear(
                len(weight), inputs, outputs, bias=False, one_by_one=one_by_one
            ).to(weight.dtype)
    else:
        factor = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    return factor.to_empty(device=weight.device)


def lora_of(module: nn.Module) -> dict[str, LoRA]:
    """Return path -> LoRA of the modules that it was applied to."""
    found: dict[str, Any] = {path: vars(m).get(_RECORD) for path, m in module.named_modules()}
    return {path: lora for path, lora in found.items() if lora is not None}
