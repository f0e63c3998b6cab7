"""Methods of adapters (LoRA, VeRA): what a method configures, and how it is applied to a module.

A method is a frozen dataclass with the fields of its configuration in ``peft``. It makes the
adapter of each adapted matrix (:meth:`AdapterMethod.part`), and says how a folder of ``peft``
describes it. Everything else is the same for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from megatron_lightning.compat import avoid_fused_inference
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import (
    ALL_ROWS,
    Adapters,
    adapted_layers,
    attach,
)
from megatron_lightning.layers.adapters.magnitude import fill_magnitudes
from megatron_lightning.layers.adapters.part import AdapterKind, AdapterPart
from megatron_lightning.layers.adapters.stacked_adapters import StackedAdapters, attach_stacked
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.ties import shared_names
from megatron_lightning.parallel.shards.transposed import is_transposed
from megatron_lightning.peft.heads import heads_of, task_of
from megatron_lightning.peft.matching import (
    ends_of,
    find_saved,
    find_targets,
    is_divided,
    saved_names,
    short_names,
    short_parameters,
)
from megatron_lightning.peft.methods.applied import (
    APPLIED,
    PARTS,
    AppliedAdapters,
    FusedRows,
    Shape,
)
from megatron_lightning.precision.qlora.base_formats import BaseFormat, check_format
from megatron_lightning.precision.qlora.frozen_base import quantize_base
from megatron_lightning.precision.served.qat import qat_of

if TYPE_CHECKING:
    from megatron_lightning.peft.saved import SavedAdapters

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class AdapterMethod(ABC):
    """Adapters of a model's linear layers. All other parameters are frozen.

    The fields follow the method's configuration in ``peft``.
    """

    peft_type: ClassVar[str]
    """Name of the method in folders of ``peft``."""
    scale_fields: ClassVar[tuple[str, ...]]
    """Fields that determine ranks and scales."""
    dropout_field: ClassVar[str]

    target_modules: str | Sequence[str] = "all-linear"
    """Layers to adapt: "all-linear" (all but the output layer), a list of names or ends of paths
    with ``*`` for any segment, or a regular expression of full paths."""
    exclude_modules: str | Sequence[str] = ()
    """Layers without adapters, in the same form."""
    modules_to_save: Sequence[str] = ()
    """Modules trained in full, such as the output layer, and saved with the adapters. Heads of
    classifiers, and modules that the model's folder lacks, are trained without being named."""
    base: BaseFormat | None = None
    """Format of the frozen weights of linear layers and experts: "nvfp4", "mxfp8" or "blockwise"
    keep quantized data and scales (QLoRA). None keeps the model's own values."""

    def __post_init__(self) -> None:
        check_format(self.base)
        if isinstance(self.modules_to_save, str):
            raise ConfigError(
                f"modules_to_save is the text {self.modules_to_save!r}. Set a list of names."
            )

    # ------------------------------------------------------------------------- of each method

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the method in messages."""

    @property
    def is_served(self) -> bool:
        """Whether vLLM serves folders of the method."""
        return False

    @abstractmethod
    def kind_of(self, largest: Shape) -> AdapterKind:
        """Return the kind of the adapters of matrices of at most ``largest`` [out, in]."""

    @abstractmethod
    def part(self, path: str, layer: nn.Module, shape: Shape, kind: AdapterKind) -> AdapterPart:
        """Return the adapter of a matrix of ``shape`` [out, in] in the layer at ``path``."""

    @abstractmethod
    def rank_of(self, path: str) -> int:
        """Return the features inside of the adapters of the layer at ``path``."""

    def scale_of(self, path: str) -> float:
        """Return the factor of the adapters' output of the layer at ``path``."""
        return 1.0

    @property
    def seed(self) -> int | None:
        """Seed of frozen values that are drawn again. None: there are none."""
        return None

    @property
    def dropout(self) -> float:
        """Probability of a zero in the adapters' input."""
        probability: float = getattr(self, self.dropout_field)
        return probability

    @abstractmethod
    def check_rounded(self) -> None:
        """Check that adapters can be added to weights that a forward rounds (``qat``).

        Raises:
            ConfigError: Naming what cannot.
        """

    @abstractmethod
    def check_targets(self, targets: Mapping[str, nn.Module], stacks: Iterable[str]) -> None:
        """Check that layers and stacked experts can be adapted.

        Raises:
            ConfigError: Naming a layer that cannot be.
        """

    def has_one(self, layer: nn.Module) -> bool:
        """Return whether a layer has a single adapter, regardless of the matrices in the weight."""
        return isinstance(layer, GroupedLinear)

    def stacks_of(self, module: nn.Module, saved: Collection[str]) -> dict[str, nn.Parameter]:
        """Return path -> parameter of the stacked experts to adapt."""
        return {}

    def attach_to(self, path: str, layer: nn.Module, adapters: Adapters) -> None:
        """Attach the adapters of the layer at ``path``."""
        attach(layer, adapters)

    def stacked_part(self, path: str, stack: nn.Parameter) -> AdapterPart:
        """Return the adapter of the stacked experts at ``path``, a parameter.

        Raises:
            ConfigError: If the method has none.
        """
        raise ConfigError(f"{self.label} has no adapters of stacked experts such as {path}.")

    @classmethod
    @abstractmethod
    def of_folder(cls, config: Mapping[str, Any], file: object) -> AdapterMethod:
        """Return the method that a configuration of ``peft`` describes.

        Raises:
            ConfigError: Naming a field with an effect on our computation.
        """

    def kind_in(self, tensors: Mapping[str, Tensor], folder: object) -> AdapterKind:
        """Return the kind of the adapters in the tensors of a folder."""
        return self.kind_of((0, 0))

    @abstractmethod
    def check_stored(self, layer: str, tensors: Mapping[str, Tensor], folder: object) -> None:
        """Check that the tensors of a layer in a folder are complete.

        Raises:
            CheckpointError: If not.
        """

    def from_folder(
        self,
        key: str,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        keys: Collection[str],
        folder: object,
    ) -> tuple[str, Mapping[str, Tensor]]:
        """Return the path of an adapted matrix, and its tensors, from those under a key of a
        folder with ``keys``.
        """
        return key, tensors

    def to_folder(self, layer: str, theirs: SavedAdapters) -> tuple[str, Mapping[str, Tensor]]:
        """Undo :meth:`from_folder`."""
        return layer, theirs.layers[layer][ALL_ROWS].tensors

    def shared_in_folder(self, kind: AdapterKind) -> Mapping[str, Tensor]:
        """Return the tensors of a folder that all layers share, by name."""
        return {}

    @abstractmethod
    def folder_fields(self, theirs: SavedAdapters) -> dict[str, Any]:
        """Return the method's own fields of a configuration of ``peft``."""

    @abstractmethod
    def exactly(self, own: SavedAdapters) -> AdapterMethod:
        """Return the method with the ranks and scales of adapters, by full paths."""

    def described(self) -> str:
        """Return the fields of ranks and scales as options."""
        values = {name: getattr(self, name) for name in self.scale_fields}
        shown = (name for name, value in values.items() if value or type(value) in (int, float))
        return ", ".join(f"{name}={_plain(values[name])}" for name in shown)

    # --------------------------------------------------------------------------- of all methods

    def apply(self, module: ModuleT, kind: AdapterKind | None = None) -> ModuleT:
        """Freeze ``module`` and attach adapters to the module's layers, in place. Return the
        module.

        Call ``apply`` before the strategy divides the module: in ``configure_model``.

        Args:
            module: The full module.
            kind: Kind of adapters that are loaded next. None: new adapters.

        Raises:
            ConfigError: If a name matches nothing, the module has adapters already, or ranks hold
                shards of the module.
        """
        _check_module(module)
        saved = find_saved(module, self.modules_to_save, heads_of(module))
        stacks = self.stacks_of(module, saved)
        targets: dict[str, nn.Module] = {}
        if self.target_modules or not stacks:
            targets = find_targets(module, self.target_modules, self.exclude_modules, saved)
        self.check_targets(targets, stacks)
        # Everything is frozen first. Adapters and saved modules are then trained, and the rest of
        # the base is quantized. Lengths of rows belong to the values that layers compute with.
        module.requires_grad_(False)
        if qat_of(module):
            self.check_rounded()
        kind, largest = self._attach(module, targets, stacks, kind)
        for child in saved.values():
            child.requires_grad_(True)
        if self.base is not None:
            quantize_base(module, self.base)
        fill_magnitudes(module)
        avoid_fused_inference(module)
        module.__dict__["expects_gradients"] = True  # unused adapters are an error
        names = tuple(saved_names(saved))
        module.__dict__[APPLIED] = AppliedAdapters(
            self,
            kind,
            (*short_names(module, targets), *short_parameters(module, stacks)),
            largest,
            {
                path: rows
                for path, layer in targets.items()
                if (rows := fused_rows(layer)) is not None and self.has_one(layer)
            },
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

    def _attach(
        self,
        module: nn.Module,
        targets: Mapping[str, nn.Module],
        stacks: Mapping[str, nn.Parameter],
        kind: AdapterKind | None,
    ) -> tuple[AdapterKind, Shape]:
        """Attach the adapters of layers and stacked experts. Return their kind, and the most rows
        and columns of the layers' matrices.
        """
        matrices = {path: self._matrices(layer) for path, layer in targets.items()}
        largest = largest_of(shape for shapes in matrices.values() for shape in shapes.values())
        kind = kind or self.kind_of(largest)
        for path, layer in targets.items():
            parts = {
                name: self.part(path, layer, shape, kind) for name, shape in matrices[path].items()
            }
            fused = fused_rows(layer)
            # Rows of queries, keys and values alternate. Those of gate and up follow each other.
            alternate = fused is not None and len(parts) > 2
            groups = fused.num_periods if fused is not None and alternate else 0
            self.attach_to(path, layer, Adapters(parts, path, num_groups=groups))
        for path in dict.fromkeys(name.rpartition(".")[0] for name in stacks):
            stacked = {
                name.rpartition(".")[2]: self.stacked_part(name, stack)
                for name, stack in stacks.items()
                if name.rpartition(".")[0] == path
            }
            attach_stacked(module.get_submodule(path), StackedAdapters(stacked, path))
        return kind, largest

    def _matrices(self, layer: nn.Module) -> dict[str, Shape]:
        """Return name -> shape [out, in] of the matrices in a layer with an adapter each."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        columns = weight.shape[0] if is_transposed(layer) else weight.shape[-1]
        fused = fused_rows(layer)
        if fused is None or self.has_one(layer):
            return {ALL_ROWS: (num_rows(layer), columns)}
        names = PARTS[len(fused.rows)]
        return {
            name: (fused.num_periods * rows, columns)
            for name, rows in zip(names, fused.rows, strict=True)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return f"{value:g}" if isinstance(value, float) else value


def _check_module(module: nn.Module) -> None:
    """Check that a module is full, and has no adapters.

    Raises:
        ConfigError: If not.
    """
    if any(map(is_divided, module.modules())):
        raise ConfigError(
            f"adapters are applied to a {type(module).__name__} whose weights are divided over "
            "ranks already, so that every rank would train adapters of its own. Apply them in "
            "configure_model, before the strategy divides the module."
        )
    if adapted_layers(module):
        raise ConfigError(
            f"{type(module).__name__} has adapters already, and others are applied. Apply a method "
            "once; several sets of adapters of one model are not supported."
        )


def largest_of(shapes: Iterable[Shape]) -> Shape:
    """Return the most rows and the most columns of matrices."""
    rows, columns = 0, 0
    for out, inputs in shapes:
        rows, columns = max(rows, out), max(columns, inputs)
    return rows, columns


def num_rows(layer: nn.Module) -> int:
    """Return the output features of a layer."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.shape[-1] if is_transposed(layer) else weight.shape[-2]


def fused_rows(layer: nn.Module) -> FusedRows | None:
    """Return the rows of the matrices in a layer's weight. None: the weight is a single matrix."""
    rows: tuple[int, ...] = tuple(getattr(layer, "fused_rows", ()))
    return FusedRows(rows, num_rows(layer) // sum(rows)) if len(rows) in PARTS else None
