"""A run to plan: the values of a configuration file that decide memory and time. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from megatron_lightning.config import (
    CompileScope,
    ContextOptions,
    DataParallel,
    DataParallelOptions,
    PipelineOptions,
    RecomputeOptions,
    TransformerConfig,
)
from megatron_lightning.models.blueprint import num_parameters
from megatron_lightning.models.measured import MeasuredModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.layer_tapes import DeviceKind
from megatron_lightning.planning.ledger.tower_memory import TowerSizes
from megatron_lightning.precision.recipes import FP8Recipe


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Values of a configuration file for a plan, apart from the model."""

    layout: ParallelLayout
    world_size: int
    node_size: int
    """Ranks of a node."""
    precision: str | int | None
    fp8_recipe: FP8Recipe | None
    """Recipe of the plugin for quantized layers, or None."""
    adapters: AdapterSizes | None
    """Trained adapters of a frozen model. None: all parameters are trained."""
    device: DeviceKind
    batch_size: int
    """Samples of a pipeline run on a data-parallel rank."""
    accumulated: int
    """Pipeline runs of an optimizer step."""
    sequence_length: int
    micro_batch_size: int
    data_parallel: DataParallel
    data: DataParallelOptions
    context: ContextOptions
    pipeline: PipelineOptions
    recompute: RecomputeOptions
    schedule: str | list[str]
    compile: CompileScope | None
    rounds_weights: bool = False
    """Whether the forward rounds the weights of blocks (``qat``)."""
    optimizer: Any = None
    """The optimizer's class path, or its section with class path and arguments. None: AdamW."""
    maximal_update: Mapping[str, Any] | None = None
    """Arguments of ``MaximalUpdate``. None: learning rates are not scaled."""
    param_groups: Sequence[Mapping[str, Any]] | None = None
    """Arguments of ``ParamGroup``, row by row. None: norms and biases do not decay."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        return ceil(self.world_size / self.node_size)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a pipeline run."""
        return ceil(self.batch_size / self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        replicas = self.layout.data_parallel_size(self.world_size)
        return self.batch_size * self.accumulated * replicas

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return False


@dataclass(frozen=True, kw_only=True)
class Recipe(PlannedRun):
    """Values of a configuration file with the sizes of a :class:`GPTModel`."""

    model: TransformerConfig
    tower: TowerSizes | None = None
    """Tower of images before the model. None: it reads text alone."""

    @property
    def ahead(self) -> float:
        """Cost of the tower on the first stage, in layers."""
        return 0.0 if self.tower is None else self.tower.cost(self.model)

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.model.moe is not None

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model."""
        return num_parameters(self.model) + (self.tower.parameters if self.tower else 0)


@dataclass(frozen=True, kw_only=True)
class MeasuredRecipe(PlannedRun):
    """Values of a configuration file with a module that was measured."""

    model: MeasuredModel

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model."""
        return sum((self.model.parameters(1) or {}).values())
