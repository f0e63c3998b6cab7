"""LoRA (https://arxiv.org/abs/2106.09685), rsLoRA (https://arxiv.org/abs/2312.03732) and DoRA
(https://arxiv.org/abs/2402.09353) for any module, with the names of Hugging Face ``peft``.

A frozen weight W [out, in] gets two trained factors, A [r, in] and B [out, r]:

    y = W x + scale B A x,    scale = lora_alpha / r,  or  lora_alpha / sqrt(r) with rsLoRA

A is drawn from the parameter's global name, so that every layout and plain Lightning begin alike. B
is zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS, Adapters
from megatron_lightning.layers.adapters.low_rank import (
    LENGTHS,
    LOW_RANK,
    A,
    B,
    LowRankAdapter,
)
from megatron_lightning.layers.adapters.part import AdapterKind, AdapterPart
from megatron_lightning.layers.adapters.weight_adapters import add_to_weight
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.transposed import is_transposed
from megatron_lightning.peft.matching import (
    check_table,
    find_parameters,
    value_of,
)
from megatron_lightning.peft.methods.applied import Shape
from megatron_lightning.peft.methods.factors import factor_of, grouped_factor
from megatron_lightning.peft.methods.folder_fields import exceptions, refuse_effects, whole
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.stacked_folder import (
    STACKED,
    flat,
    key_of,
    stacked_name,
    unflat,
)
from megatron_lightning.precision.served.gemm import ServedGemm

if TYPE_CHECKING:
    from megatron_lightning.peft.saved import SavedAdapters

_READ = frozenset((
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "use_rslora", "modules_to_save", "base_model_name_or_path", "revision",
    "target_parameters", "use_dora", "init_lora_weights",
))  # fmt: skip
_SAME_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Initializations of adapters that leave the base's weights as they are. (``mica`` trains A alone,
so folders of it are read and merged.)"""


@dataclass(frozen=True, kw_only=True)
class LoRA(AdapterMethod):
    """Low-rank adapters of a model's linear layers. All other parameters are frozen.

    The fields follow ``peft.LoraConfig``.

    Raises:
        ConfigError: If a value cannot be.
    """

    peft_type: ClassVar[str] = "LORA"
    scale_fields: ClassVar[tuple[str, ...]] = (
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"
    )  # fmt: skip
    dropout_field: ClassVar[str] = "lora_dropout"

    r: int = 8
    """Rank: features between the two factors."""
    lora_alpha: float = 16.0
    """The adapters' output is multiplied by lora_alpha / r."""
    lora_dropout: float = 0.0
    """Probability of a zero in the adapters' input."""
    target_parameters: Sequence[str] = ()
    """Stacked experts of untouched models to adapt: ends of the paths of parameters [E, out, in],
    such as "experts.gate_up_proj"."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Regular expression of the end of a path -> rank in the place of ``r``."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Regular expression of the end of a path -> alpha in the place of ``lora_alpha``."""
    use_rslora: bool = False
    """Divide lora_alpha by sqrt(r) instead of r."""
    use_dora: bool = False
    """Train the lengths of the adapted weights' rows beside the adapters (DoRA)."""
    fused: Literal["parts", "one"] = "parts"
    """Adapters of a weight of several matrices (query, key, value; gate, up): "parts" has an
    adapter for each matrix, as in models of ``transformers``. "one" has a single adapter for all
    matrices, with fewer parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def kind_of(self, largest: Shape) -> AdapterKind:
        """Return two factors and lengths, for matrices of any shape."""
        return LOW_RANK

    def part(self, path: str, layer: nn.Module, shape: Shape, kind: AdapterKind) -> AdapterPart:
        """Return the adapter of a matrix of ``shape`` [out, in] in the layer at ``path``."""
        (out, inputs), rank = shape, self.rank_of(path)
        factors = [factor_of(layer, *sizes) for sizes in ((inputs, rank), (rank, out))]
        return LowRankAdapter(
            *factors,
            scale=self.scale_of(path),
            dropout=self.lora_dropout,
            lora_magnitude=factor_of(layer, 1, out) if self.use_dora else None,
        )

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapters of the layer at ``path``."""
        return value_of(path, self.rank_pattern, self.r)

    def scale_of(self, path: str) -> float:
        """Return the factor of the adapters' output of the layer at ``path``."""
        rank = self.rank_of(path)
        alpha = value_of(path, self.alpha_pattern, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def label(self) -> str:
        """Name of the method in messages."""
        return "DoRA" if self.use_dora else "LoRA"

    @property
    def is_served(self) -> bool:
        """Whether vLLM serves folders of the method."""
        return not self.use_dora

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

    def check_targets(self, targets: Mapping[str, nn.Module], stacks: Iterable[str]) -> None:
        """Check that options fit the layers.

        Raises:
            ConfigError: Naming a layer that they do not fit.
        """
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
        for path, layer in targets.items():
            if self.use_dora and (isinstance(layer, GroupedLinear) or is_transposed(layer)):
                kind = "experts" if isinstance(layer, GroupedLinear) else "GPT-2's Conv1D"
                raise ConfigError(
                    f"use_dora is True, and {path} is a layer of {kind}, which has plain LoRA "
                    "only. Leave it out by exclude_modules, or set use_dora to False."
                )

    def has_one(self, layer: nn.Module) -> bool:
        """Return whether a layer has a single adapter, regardless of the matrices in the weight."""
        return self.fused == "one" or super().has_one(layer)

    def stacks_of(self, module: nn.Module, saved: Collection[str]) -> dict[str, nn.Parameter]:
        """Return path -> parameter of the stacked experts to adapt."""
        return find_parameters(module, self.target_parameters, saved)

    def attach_to(self, path: str, layer: nn.Module, adapters: Adapters) -> None:
        """Attach adapters to a layer's output, or to its weight if the layer rounds it."""
        super().attach_to(path, layer, adapters)
        if isinstance(getattr(layer, "gemm", None), ServedGemm):
            add_to_weight(layer, adapters)

    def stacked_part(self, path: str, stack: nn.Parameter) -> AdapterPart:
        """Return the adapter of the stacked experts at ``path``, a parameter."""
        num_experts, out, inputs = stack.shape
        rank = self.rank_of(path)
        factors = [
            grouped_factor(num_experts, *sizes, stack) for sizes in ((inputs, rank), (rank, out))
        ]
        return LowRankAdapter(*factors, scale=self.scale_of(path))

    # ------------------------------------------------------------------------- folders of peft

    @classmethod
    def of_folder(cls, config: Mapping[str, Any], file: object) -> LoRA:
        """Return the LoRA described by a configuration of ``peft``.

        Raises:
            ConfigError: Naming a field with an effect on our computation.
        """
        refuse_effects(config, _READ, file)
        init = config.get("init_lora_weights", True)
        if (init.lower() if isinstance(init, str) else init) not in _SAME_BASE:
            raise ConfigError(
                f"{file} has init_lora_weights={init!r}, which changes the base's "
                "weights before the training, so that the adapters are wrong on the base as it is. "
                "Convert them by peft to adapters of the unchanged base: save the model before the "
                "training (save_pretrained(FIRST)), and write the trained one by "
                "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=FIRST)."
            )
        return cls(
            r=config.get("r", 8),
            lora_alpha=config.get("lora_alpha", 8),
            lora_dropout=config.get("lora_dropout") or 0.0,
            target_modules=config.get("target_modules") or "all-linear",
            exclude_modules=config.get("exclude_modules") or (),
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
            use_rslora=bool(config.get("use_rslora")),
            use_dora=bool(config.get("use_dora")),
            modules_to_save=config.get("modules_to_save") or (),
        )

    def check_stored(self, layer: str, tensors: Mapping[str, Tensor], folder: object) -> None:
        """Check that a layer has both factors, and lengths if ``use_dora`` is set.

        Raises:
            CheckpointError: If not.
        """
        first, second = tensors.get(A), tensors.get(B)
        if first is None or second is None or second.shape[-1] != first.shape[0]:
            raise CheckpointError(
                f"{folder}/{ADAPTER_WEIGHTS}: lora_B of {layer} is missing or misshaped."
            )
        if (LENGTHS in tensors) != self.use_dora:
            name = f"{layer}.{LOW_RANK.names[LENGTHS]}"
            raise CheckpointError(
                f"{folder}: {ADAPTER_CONFIG} has use_dora={self.use_dora}, and {ADAPTER_WEIGHTS} "
                f"{'a' if LENGTHS in tensors else 'no'} {name}. Restore the folder."
            )

    def from_folder(
        self,
        key: str,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        keys: Collection[str],
        folder: object,
    ) -> tuple[str, Mapping[str, Tensor]]:
        """Return path and tensors of a matrix, or of stacked experts."""
        stacked = stacked_name(key, config, keys)
        if stacked is None:
            return key, tensors
        return stacked, unflat(tensors, self.rank_of(stacked), folder)

    def to_folder(self, layer: str, theirs: SavedAdapters) -> tuple[str, Mapping[str, Tensor]]:
        """Undo :meth:`from_folder`."""
        stacked = [path for path, parts in theirs.layers.items() if parts[ALL_ROWS].num_experts]
        tensors = theirs.layers[layer][ALL_ROWS].tensors
        return (key_of(layer, stacked), flat(tensors)) if layer in stacked else (layer, tensors)

    def folder_fields(self, theirs: SavedAdapters) -> dict[str, Any]:
        """Return LoRA's own fields of a configuration of ``peft``."""
        # peft has a default rank and alpha. Other values go into the patterns.
        ranks: dict[str, Any] = {}
        alphas: dict[str, Any] = {}
        for layer, parts in theirs.layers.items():
            part = parts[ALL_ROWS]
            ranks[layer], alphas[layer] = part.rank, whole(part.scale * self._root(part.rank))
        alpha = whole(self.lora_alpha)
        return {
            "r": self.r,
            "lora_alpha": alpha,
            "lora_dropout": self.lora_dropout,
            "rank_pattern": exceptions(ranks, self.r),
            "alpha_pattern": exceptions(alphas, alpha),
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "init_lora_weights": True,
            "target_parameters": _stacked_targets(theirs) or None,
        }

    def exactly(self, own: SavedAdapters) -> LoRA:
        """Return the LoRA with the ranks and scales of adapters, as patterns of full paths,
        whatever patterns made them.
        """
        ranks, alphas = {}, {}
        for path, parts in own.layers.items():
            first = next(iter(parts.values()))
            key, alpha = re.escape(path), first.scale * self._root(first.rank)
            if first.rank != self.r:
                ranks[key] = first.rank
            if abs(alpha - self.lora_alpha) > 1e-9 * abs(self.lora_alpha):
                alphas[key] = alpha
        return replace(self, base=None, rank_pattern=ranks, alpha_pattern=alphas)

    def _root(self, rank: int) -> float:
        """Return the divisor of lora_alpha."""
        return math.sqrt(rank) if self.use_rslora else rank


def _stacked_targets(theirs: SavedAdapters) -> list[str]:
    """Return ``target_parameters``: the ends of the paths of stacked experts."""
    paths = [path for path, parts in theirs.layers.items() if parts[ALL_ROWS].num_experts]
    ends = {".".join(path.rsplit(".", 2)[1:]) for path in paths}
    return sorted(ends, key=lambda end: STACKED.index(end.rpartition(".")[2]))
