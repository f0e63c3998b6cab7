"""Sizes of a module without a blueprint, measured by a run without values. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_lightning.config.parallel import PipelineOptions


@dataclass(frozen=True)
class UnitMeasure:
    """Work and bytes of one sample in a unit of the pipeline, over all tensor-parallel ranks."""

    forward_flops: float = 0.0
    """Floating-point operations of the forward."""
    stream_bytes: float = 0.0
    """Bytes of the unit's first input, sent between stages."""
    kept_stream_bytes: float = 0.0
    """Bytes kept for backward in tensors as wide as the input. Tensor-parallel ranks keep all."""
    kept_inner_bytes: float = 0.0
    """Bytes kept for backward in other tensors. Tensor-parallel ranks keep a share."""


class MeasuredModel(Protocol):
    """A module measured on the module's example inputs."""

    @property
    def name(self) -> str:
        """Name of the module's class."""
        ...

    @property
    def units(self) -> Mapping[str, UnitMeasure]:
        """Units of the pipeline in order."""
        ...

    @property
    def outside(self) -> UnitMeasure:
        """Code outside of the units, such as a head, and the loss."""
        ...

    def parameters(self, tensor_parallel_size: int) -> Mapping[str, int] | None:
        """Return the parameters of a rank by unit, and outside of units under "". None: the module
        cannot be divided so.
        """
        ...

    def stages(self, pp: int, vpp: int, options: PipelineOptions) -> Sequence[Sequence[str]] | None:
        """Return the units of every stage. None: the module cannot be divided so."""
        ...
