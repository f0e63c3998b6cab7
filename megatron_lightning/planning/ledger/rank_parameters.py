"""Parameters of a :class:`GPTModel` on one rank: the number per unit, and the replicating ranks.

No torch here.

A *unit* is an element of
``GPTModel.pipeline_units()``: the embedding, a layer, the final norm, a layer of multi-token
prediction, the output layer, or the losses of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.models.blueprint import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    PREDICTING,
    Weight,
    embedding_weights,
    unit_weights,
)
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.stage_layouts import split_units

_FIRST_LAYER = f"{LAYER}0"


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a rank."""

    dense: int = 0
    """Parameters replicated over data- and context-parallel ranks."""
    experts: int = 0
    """Parameters replicated over expert-data-parallel ranks."""

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """Sum of both kinds."""
        return self.dense + self.experts


def split_stages(
    config: TransformerConfig,
    placement: Placement,
    options: PipelineOptions,
    *,
    ahead: float = 0.0,
) -> tuple[tuple[str, ...], ...]:
    """Return the units of every stage.

    Args:
        config: The model.
        placement: The stages.
        options: Partition of the model.
        ahead: Cost of a tower on the first stage, in layers.

    Raises:
        ConfigError: If the options do not fit the model.
    """
    units = pipeline_units(config)
    if ahead:
        units = [(name, 1.0 + ahead) if name == _FIRST_LAYER else name for name in units]
    return split_units(units, placement, options)


def layer_of(unit: str) -> int | None:
    """Return the layer number of a unit, or None if the unit is not a layer."""
    return int(unit.removeprefix(LAYER)) if unit.startswith(LAYER) else None


def predicting_layer_of(unit: str) -> int | None:
    """Return the number of a multi-token prediction layer, or None for another unit."""
    return int(unit.removeprefix(PREDICTING)) if unit.startswith(PREDICTING) else None


def kind_of(config: TransformerConfig, unit: str) -> str | None:
    """Return the layer kind of a unit, or None for a unit without a layer.

    The kind of multi-token prediction is the kind of its last layer.
    """
    layer = layer_of(unit)
    if layer is not None:
        return config.layer_kinds[layer]
    return None if predicting_layer_of(unit) is None else config.depth_kinds[-1]


def config_of(config: TransformerConfig, unit: str) -> TransformerConfig:
    """Return the configuration of a unit's layer, with the layer's window and positions."""
    layer = layer_of(unit)
    return config.of_layer(config.num_layers if layer is None else layer)


def count_unit(config: TransformerConfig, layout: ParallelLayout, unit: str) -> ParameterCount:
    """Return the parameters of a unit on tensor-parallel rank 0, the fullest rank, without copies
    of the embedding.
    """
    counts = (local_size(weight, layout) for weight in unit_weights(config, unit))
    return sum(counts, ParameterCount())


def local_size(weight: Weight, layout: ParallelLayout) -> ParameterCount:
    """Return the elements of a weight on tensor-parallel rank 0, the fullest rank."""
    size = weight.size
    if weight.experts is not None:
        return ParameterCount(0, size // layout.ep // (layout.etp if weight.split else 1))
    if weight.kind == "embedding" and weight.split:
        rows, width = weight.shape
        return ParameterCount(-(-rows // layout.tp) * width)
    return ParameterCount(size // layout.tp if weight.split else size)


class LocalMatrices(NamedTuple):
    """Matrices of a linear layer, or of a rank's experts, on a rank."""

    num: float
    """1, or the number of experts."""
    features_in: float
    features_out: float
    style: Literal["column", "row", "replicated"]
    """Split over tensor-parallel ranks."""


def local_matrices(weight: Weight, layout: ParallelLayout) -> LocalMatrices:
    """Return the matrices of a weight on tensor-parallel rank 0, the fullest rank."""
    rows, columns = map(float, weight.shape[-2:])
    num_ranks = layout.tp if weight.experts is None else layout.etp
    num = 1.0 if weight.experts is None else weight.experts / layout.ep
    if weight.split is None:
        return LocalMatrices(num, columns, rows, "replicated")
    if weight.split == "columns":
        return LocalMatrices(num, columns / num_ranks, rows, "row")
    # The vocabulary need not be divisible.
    local_rows = float(ceil(rows / num_ranks)) if weight.kind == "embedding" else rows / num_ranks
    return LocalMatrices(num, columns, local_rows, "column")


def count_rank(
    config: TransformerConfig, layout: ParallelLayout, stages: Sequence[Sequence[str]]
) -> ParameterCount:
    """Return the parameters of a rank with ``stages``. A tied weight counts once."""
    units = [unit for stage in stages for unit in stage]
    total = sum((count_unit(config, layout, unit) for unit in units), ParameterCount())
    words, *positions = (local_size(w, layout).dense for w in embedding_weights(config))
    is_shared = config.share_embeddings_and_output_weights and OUTPUT in units
    if is_shared and EMBEDDING in units:
        total += ParameterCount(-words)
    if any(predicting_layer_of(unit) is not None for unit in units) and EMBEDDING not in units:
        total += ParameterCount((0 if is_shared else words) + sum(positions))
    return total
