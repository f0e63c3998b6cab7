"""Styles of unchanged modules with sharded parameters.

The module's forward must take sizes from parameters and activations, not from attributes of the
full model, unless the plan's ``attributes`` rewrite the attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.styles.adapters import partial_over, roles_of
from megatron_lightning.layers.styles.regions import map_tensors, reduce_output
from megatron_lightning.parallel.collectives import copy_to_axis
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan, take_shards
from megatron_lightning.parallel.shards.spec import Shape, ShardSpec

_STACK_DIMS = 3  # experts, outputs, inputs
_ROW_MULTIPLE = 8  # torch's grouped GEMM takes rows of 16 bytes: 8 values in 16 bits


@dataclass(frozen=True)
class Split:
    """Split of a parameter over the tensor-parallel ranks."""

    dim: int = 0
    """Split dim. Negative dims count from the last."""
    blocks: int = 1
    """Equal stacked blocks along the dim, each split (2 for fused gates and up projections)."""
    parts: tuple[int, ...] = ()
    """Sizes of unequal stacked parts along dim 0, each split. (): equal blocks."""
    uneven: bool = False
    """The ranks may hold unequal shares of dim 0, as of a vocabulary."""

    def spec(self, shape: Shape, group: AxisGroup) -> ShardSpec:
        """Return the spec of this rank's shard of a parameter of ``shape``."""
        sizes: dict[str, Any] = {"size": group.size, "rank": group.rank, "axis": group.name}
        if self.uneven:
            return ShardSpec.split_rows(shape, **sizes)
        if self.parts:
            return ShardSpec.split_parts(shape, parts=self.parts, **sizes)
        return ShardSpec.split(shape, dim=self.dim % len(shape), blocks=self.blocks, **sizes)


@dataclass(frozen=True)
class ParameterShards:
    """A module that uses shards of its parameters (attention sinks, a bias of each head's scores).

    Weights: split by ``splits``, all others full. Input and output are unchanged, in backward too:
    the result of a shard belongs to this rank's heads or features.
    """

    splits: Mapping[str, Split]
    """Name of a direct parameter of the module -> its split."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Replace the parameters by shards, in place."""
        shard_parameters(module, self.splits, context.tp)
        return module


@dataclass(frozen=True)
class TensorParallelExperts:
    """A module of experts, each expert split over the ranks like a feed-forward layer.

    Weights: split as said (fused gates and up projections by output, down projections by input).
    Input: all floating-point arguments (hidden states, routing weights) are replicated, and their
    gradients all-reduced. Output: partial sums, all-reduced. The gradient passes unchanged. A bias
    that each rank would add to the sum is refused.
    """

    splits: Mapping[str, Split]
    """Name of a direct parameter of the module -> its split."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Shard the parameters, and enter and leave the parallel region around the forward."""
        full_names = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if name not in self.splits and parameter.requires_grad
        ]
        if full_names and context.tp.size > 1:
            raise ShardingError(
                f"the plan splits {', '.join(self.splits)} of a {type(module).__name__} and not "
                f"{', '.join(full_names)}, which each of the {context.tp.size} ranks would use in "
                "full before their outputs are added. Give every parameter of the module a "
                "split, or set tensor_model_parallel_size to 1."
            )
        shard_parameters(module, self.splits, context.tp)
        if context.tp.size > 1:
            _avoid_grouped_gemm(module)
            module.register_forward_pre_hook(CopyArguments(context.tp), with_kwargs=True)
            reduce_output(module, context.tp)
        return module

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the parameters: the factor with the split features. The other
        factor's gradient is a partial sum over the ranks.
        """
        for part in roles_of(module):
            split, full_factors = part.outputs, part.inputs
            rule = self.splits[part.part]
            if rule.dim % _STACK_DIMS == _STACK_DIMS - 1:  # the input's features
                split, full_factors = full_factors, split
            for factor in split:
                shard_parameters(factor, {"weight": rule}, context.tp)
            for factor in full_factors if context.tp.size > 1 else ():
                partial_over(factor, context.tp)


def _avoid_grouped_gemm(module: nn.Module) -> None:
    """Set experts of ``transformers`` to be computed one by one if torch's grouped GEMM refuses
    the width of the shards, even if the GEMM takes the width of full experts.

    The precision may make the weights 16 bits wide later.
    """
    config: Any = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return
    stacks = [p for p in module.parameters(recurse=False) if p.ndim == _STACK_DIMS]
    if any(size % _ROW_MULTIPLE for p in stacks for size in p.shape[1:]):
        own = copy(config)  # modules of another width share the original
        own._experts_implementation = "eager"
        module.config = own


@dataclass(frozen=True)
class CopyArguments:
    """Forward pre-hook: floating-point arguments are copied into the parallel region."""

    group: AxisGroup

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments. Backward all-reduces their gradients."""
        return map_tensors(args, self._copy), map_tensors(kwargs, self._copy)

    def _copy(self, x: Tensor) -> Tensor:
        return copy_to_axis(x, self.group) if x.is_floating_point() else x


def shard_parameters(module: nn.Module, splits: Mapping[str, Split], group: AxisGroup) -> None:
    """Replace parameters of ``module`` by this rank's shards, and declare the specs of all direct
    parameters.
    """
    missing_names = [name for name in splits if module._parameters.get(name) is None]
    if missing_names:
        raise ShardingError(
            f"the plan splits {', '.join(missing_names)} of a {type(module).__name__}, whose own "
            f"parameters are {', '.join(module._parameters) or 'none'}. Correct the names."
        )
    specs: dict[str, ShardSpec] = {
        name: splits[name].spec(tuple(parameter.shape), group)
        if name in splits
        else ShardSpec.replicated(parameter.shape)
        for name, parameter in module.named_parameters(recurse=False)
    }
    if group.size == 1:
        module.shard_specs = specs  # type: ignore[assignment]
    else:
        take_shards(module, module, specs)
