"""Record of the adapters that were applied to a module."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from megatron_lightning.layers.adapters.part import AdapterKind

if TYPE_CHECKING:
    from megatron_lightning.peft.methods.method import AdapterMethod

APPLIED = "_megatron_lora"
"""Attribute of a module after adapters were applied."""
PARTS: Mapping[int, tuple[str, ...]] = {
    2: ("gate", "up"),
    3: ("q", "k", "v"),
    4: ("q", "gate", "k", "v"),
}
"""Number of the matrices in a fused weight -> their names."""
Shape = tuple[int, int]


class FusedRows(NamedTuple):
    """Rows of the matrices in a fused weight, repeated ``num_periods`` times."""

    rows: tuple[int, ...]
    num_periods: int


class AppliedAdapters(NamedTuple):
    """Record of applied adapters, kept on the module and in checkpoints."""

    method: AdapterMethod
    kind: AdapterKind
    targets: tuple[str, ...]
    """Names of the adapted layers: last segments of paths if all layers of the name are adapted,
    else paths."""
    largest: Shape
    """Most rows and most columns of the adapted matrices."""
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


def applied_to(module: nn.Module) -> dict[str, AppliedAdapters]:
    """Return path -> record of the modules with applied adapters."""
    records: dict[str, Any] = {path: vars(m).get(APPLIED) for path, m in module.named_modules()}
    return {path: applied for path, applied in records.items() if applied is not None}
