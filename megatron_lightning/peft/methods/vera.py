"""VeRA (https://arxiv.org/abs/2310.11454) for any module, with the names of Hugging Face ``peft``.

Layers share two frozen random projections, and train two vectors each: of the rank's features, and
of the output's. See :mod:`megatron_lightning.layers.adapters.shared_projections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_lightning.layers.adapters.part import AdapterKind, AdapterPart
from megatron_lightning.layers.adapters.shared_projections import (
    B_VECTOR,
    D_VECTOR,
    Pair,
    Projections,
    VectorAdapter,
    Vectors,
)
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.peft.methods.applied import Shape
from megatron_lightning.peft.methods.factors import factor_of
from megatron_lightning.peft.methods.folder_fields import refuse_effects
from megatron_lightning.peft.methods.method import AdapterMethod

if TYPE_CHECKING:
    from megatron_lightning.peft.saved import SavedAdapters

_FIRST, _SECOND = "base_model.vera_A", "base_model.vera_B"
_READ = frozenset((
    "r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "target_modules",
    "modules_to_save", "exclude_modules", "base_model_name_or_path", "revision", "init_weights",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VeRA(AdapterMethod):
    """Trained vectors between frozen random projections that all layers share. All other parameters
    are frozen.

    The fields follow ``peft.VeraConfig``. A rank of 256 trains fewer parameters than LoRA of rank
    1.

    Raises:
        ConfigError: If a value cannot be.
    """

    peft_type: ClassVar[str] = "VERA"
    scale_fields: ClassVar[tuple[str, ...]] = ("r", "projection_prng_key")
    dropout_field: ClassVar[str] = "vera_dropout"

    r: int = 256
    """Rank: features between the projections."""
    projection_prng_key: int = 0
    """Seed of the projections."""
    save_projection: bool = True
    """Write the projections into folders of ``peft``. Otherwise readers draw them again."""
    vera_dropout: float = 0.0
    """Probability of a zero in the adapters' input."""
    d_initial: float = 0.1
    """First value of the vectors between the projections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(f"r of VeRA is {self.r!r}; must be a positive integer.")
        key = self.projection_prng_key
        if isinstance(key, bool) or not isinstance(key, int):
            raise ConfigError(
                f"projection_prng_key of VeRA is {key!r}, and every rank draws the projections "
                "from it. Set an integer, such as 0."
            )
        if not 0.0 <= self.vera_dropout < 1.0:
            raise ConfigError(
                f"vera_dropout is {self.vera_dropout}; must be a probability below 1. Set 0 for "
                "none."
            )

    @property
    def label(self) -> str:
        """Name of the method in messages."""
        return "VeRA"

    @property
    def seed(self) -> int | None:
        """Seed of the projections."""
        return self.projection_prng_key

    def kind_of(self, largest: Shape) -> Vectors:
        """Return vectors around projections for matrices of at most ``largest`` [out, in]."""
        return Vectors(Projections(self.r, largest, self.projection_prng_key))

    def part(self, path: str, layer: nn.Module, shape: Shape, kind: AdapterKind) -> AdapterPart:
        """Return the adapter of a matrix of ``shape`` [out, in] in the layer at ``path``."""
        if not isinstance(kind, Vectors):
            raise TypeError(f"VeRA got the kind {type(kind).__name__}")
        vectors = factor_of(layer, 1, shape[0]), factor_of(layer, 1, self.r)
        return VectorAdapter(
            kind, shape, vectors, d_initial=self.d_initial, dropout=self.vera_dropout
        )

    def rank_of(self, path: str) -> int:
        """Return the rank, which is the same for all layers."""
        return self.r

    def check_rounded(self) -> None:
        """Refuse weights that a forward rounds (``qat``).

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "VeRA is set beside qat, and a rounded weight adds the two factors of LoRA alone. Use "
            "LoRA, or train without qat."
        )

    def check_targets(self, targets: Mapping[str, nn.Module], stacks: Iterable[str]) -> None:
        """Check that no target is a layer of experts.

        Raises:
            ConfigError: Naming one.
        """
        for path, layer in targets.items():
            if isinstance(layer, GroupedLinear):
                raise ConfigError(
                    f"{path} is a layer of experts, for which VeRA has no vectors (nor has that of "
                    "peft). Leave the experts out by exclude_modules, or use LoRA."
                )

    # ------------------------------------------------------------------------- folders of peft

    @classmethod
    def of_folder(cls, config: Mapping[str, Any], file: object) -> VeRA:
        """Return the VeRA described by a configuration of ``peft``.

        Raises:
            ConfigError: Naming a field with an effect on our computation.
        """
        refuse_effects(config, _READ, file)
        return cls(
            r=config.get("r", 256),
            projection_prng_key=config.get("projection_prng_key") or 0,
            save_projection=bool(config.get("save_projection", True)),
            vera_dropout=config.get("vera_dropout") or 0.0,
            d_initial=config.get("d_initial", 0.1),
            target_modules=config.get("target_modules") or "all-linear",
            exclude_modules=config.get("exclude_modules") or (),
            modules_to_save=config.get("modules_to_save") or (),
        )

    def kind_in(self, tensors: Mapping[str, Tensor], folder: object) -> AdapterKind:
        """Return vectors around the projections of a folder, or of the seed."""
        first, second = tensors.get(_FIRST), tensors.get(_SECOND)
        if first is None or second is None:
            if self.save_projection:
                raise CheckpointError(
                    f"{folder}: {ADAPTER_CONFIG} has save_projection=true, and {ADAPTER_WEIGHTS} "
                    "no vera_A or vera_B. Restore the folder, or set save_projection to false to "
                    "draw them again."
                )
            return self.kind_of((0, 0))
        if first.shape[0] != self.r or second.shape[1] != self.r:
            raise CheckpointError(
                f"{folder}: vera_A and vera_B have the shapes {list(first.shape)} and "
                f"{list(second.shape)}, and {ADAPTER_CONFIG} the rank {self.r}. Restore the folder."
            )
        largest, key = (second.shape[0], first.shape[1]), self.projection_prng_key
        drawn = Projections(self.r, largest, key)
        given = Pair(first, second)
        # Projections of a folder in bf16 are the seed's, rounded.
        pairs = zip(drawn.drawn(), given, strict=True)
        if all(torch.equal(own.to(theirs.dtype), theirs) for own, theirs in pairs):
            return Vectors(drawn)
        return Vectors(Projections(self.r, largest, key, given))

    def check_stored(self, layer: str, tensors: Mapping[str, Tensor], folder: object) -> None:
        """Check that a layer has both vectors.

        Raises:
            CheckpointError: If not.
        """
        if missing := {B_VECTOR, D_VECTOR} - tensors.keys():
            name = Vectors.names[min(missing)]
            raise CheckpointError(f"{folder}/{ADAPTER_WEIGHTS}: {name} of {layer} is missing.")

    def shared_in_folder(self, kind: AdapterKind) -> Mapping[str, Tensor]:
        """Return the projections, unless readers draw them."""
        if not isinstance(kind, Vectors) or not self.save_projection:
            return {}
        first, second = kind.projections.like(torch.empty(0))
        return {_FIRST: first, _SECOND: second}

    def folder_fields(self, theirs: SavedAdapters) -> dict[str, Any]:
        """Return VeRA's own fields of a configuration of ``peft``."""
        return {
            "r": self.r,
            "projection_prng_key": self.projection_prng_key,
            "save_projection": self.save_projection,
            "vera_dropout": self.vera_dropout,
            "d_initial": self.d_initial,
            "init_weights": True,
        }

    def exactly(self, own: SavedAdapters) -> VeRA:
        """Return the method on values of the base."""
        return replace(self, base=None)
