"""Sizes of every parallel axis, in the user's form in Python or YAML, without torch.

Axis names, used throughout the package (an *axis* is a dimension of the grid of ranks, a *dim* a
dimension of a tensor). No name means two things. Experts live on the same ranks as everything else,
sharded over axes of their own:

    dense layers  tp   tensor model parallel   cp  context parallel       dp   data parallel
    experts       etp  expert tensor parallel  ep  expert model parallel  edp  expert data parallel
    both          pp   pipeline parallel
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from megatron_lightning.config.strategy import StrategySettings
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

ORDER = ("tp", "cp", "ep", "dp", "pp")
"""Axes in the order string. tp and dp place etp and edp as well."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes. The rest of the world is data parallel.

    Raises:
        ConfigError: If a size is not a positive integer, or the sizes contradict one another.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (tp)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the sequence of layers (pp)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks on each pipeline rank. The model has pp times this many stages."""
    context_parallel_size: int = 1
    """Ranks that share each sequence (cp)."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture-of-experts layer (ep)."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices (etp). None: same as tensor_model_parallel_size."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Shard activations between tensor-parallel regions along the sequence. "auto": on when tp > 1
    and the sharding plan says how to shard the sequence."""
    order: str = "tp-cp-ep-dp-pp"
    """Order of the axes in the rank numbering, leftmost fastest (Megatron's default)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith("_size") or (
                value is None and field.name == "expert_tensor_parallel_size"
            ):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{field.name} is {value!r}; it must be a positive integer. Set it to 1 or "
                    "more."
                )
        if self.sequence_parallel is True and self.tp == 1:
            raise ConfigError(
                "sequence_parallel is True with tensor_model_parallel_size=1; it shards "
                "activations over the tensor-parallel "
                'ranks, and there is one. Set sequence_parallel to "auto" or '
                "tensor_model_parallel_size to 2 or more."
            )
        if self.sequence_parallel not in (True, False, "auto"):
            raise ConfigError(
                f'sequence_parallel is {self.sequence_parallel!r}. Set it to true, false or "auto".'
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size={self.vpp} needs a pipeline, and "
                "pipeline_model_parallel_size is 1. Set pipeline_model_parallel_size to 2 or "
                "more, or virtual_pipeline_model_parallel_size to 1."
            )
        if sorted(self.order.split("-")) != sorted(ORDER):
            raise ConfigError(
                f"order is {self.order!r}; it must list each of {', '.join(ORDER)} once, joined by "
                "'-'."
            )

    @classmethod
    def of(cls, settings: StrategySettings) -> ParallelLayout:
        """Return the layout of the strategy's settings.

        Raises:
            ConfigError: If the sizes contradict one another.
        """
        names = [field.name for field in fields(cls) if field.name != "order"]
        return cls(**{name: getattr(settings, name) for name in names})

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Expert-tensor-parallel size."""
        return self.expert_tensor_parallel_size or self.tp

    @property
    def sp(self) -> bool:
        """Whether activations are sharded along the sequence between tensor-parallel regions."""
        return self.tp > 1 if self.sequence_parallel == "auto" else bool(self.sequence_parallel)

    @property
    def model_parallel_size(self) -> int:
        """Ranks with different parameters of a model replica: of the dense layers, or of the
        experts if experts are sharded more.
        """
        return max(self.tp, self.etp * self.ep) * self.pp

    @property
    def replica_size(self) -> int:
        """Ranks that run the same samples together."""
        return self.tp * self.cp * self.pp

    @property
    def divides_experts(self) -> bool:
        """Whether experts are sharded otherwise than dense layers."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.pp * self.vpp

    @property
    def smallest_world_size(self) -> int:
        """Smallest number of ranks for the layout."""
        return math.lcm(self.tp * self.cp, self.etp * self.ep) * self.pp

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size for ``world_size`` ranks."""
        if not is_count(world_size):
            raise ConfigError(
                f"the number of ranks is {world_size!r}; it must be a positive integer. Set it, or "
                "num_nodes x devices."
            )
        model = self.replica_size
        if world_size % model:
            raise ConfigError(
                f"{world_size} ranks cannot be divided into model replicas of {model} ranks "
                f"(tensor {self.tp} x context {self.cp} x pipeline {self.pp}). "
                f"Set num_nodes x devices to a multiple of {model}, or lower one of the sizes."
            )
        expert = self.etp * self.ep * self.pp
        if world_size % expert:
            raise ConfigError(
                f"{world_size} ranks cannot be divided into expert replicas of {expert} ranks "
                f"(expert tensor {self.etp} x expert {self.ep} x pipeline {self.pp}). "
                f"Set num_nodes x devices to a multiple of {expert}, or lower one of the sizes."
            )
        data, expert_data = world_size // model, world_size // expert
        if not self.order.endswith("pp") and self.pp > 1 and data != expert_data:
            raise ConfigError(
                f"order {self.order!r} with pp > 1 needs equal data-parallel sizes, and the dense "
                f"grid has {data}, the expert grid {expert_data}. Put pp last in the order."
            )
        return data
