"""Division of a layer's adapters by styles, for our adapters and ``peft``'s.

With h = A x [..., r]:

    column-parallel  B takes the style of W. A is full. Ranks copy or gather h, r numbers a token.
                     The gradient of A is a partial sum under sequence parallelism (A sees a shard
                     of the tokens) and inside a ``ParallelInput`` region (a rank's rows of B).
    row-parallel     A takes the style of W, so that h is reduced, or reduce-scattered. B is full.
                     The gradient of B is a partial sum under sequence parallelism.

The lengths of rows (DoRA) are sharded like the rows of a column-parallel W. Those of a row-parallel
W are full, and their gradient is a partial sum under sequence parallelism.

A fused layer has an adapter for all rows, sharded like W, or an adapter for each matrix in W,
sharded like the separate matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS, adapters_of
from megatron_lightning.layers.adapters.magnitude import magnitude_of
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.linear.parallel_linear import SharedGroupsLinear
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.attachments import base_layer
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style, take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec


class Factors(NamedTuple):
    """One adapter of a layer."""

    part: str
    """Name of the matrix in the layer's weight. "all": all rows."""
    lora_A: nn.Module
    lora_B: nn.Module
    dropout: Dropout
    lora_magnitude: nn.Module | None = None
    """Holds the lengths of the weight's rows. None: no DoRA."""


def factors_of(module: nn.Module) -> list[Factors]:
    """Return the adapters of a layer, or of the layer inside a ``peft`` wrapper.

    Raises:
        ShardingError: If the wrapper holds something else than the two factors of LoRA.
    """
    adapters = adapters_of(module)
    if adapters is not None:
        return [
            Factors(name, part.lora_A, part.lora_B, part.dropout, magnitude_of(part))
            for name, part in adapters.parts.items()
        ]
    if base_layer(module) is module:
        return []
    return list(_peft_factors(module))


def _peft_factors(module: nn.Module) -> Iterator[Factors]:
    """Yield the adapters in a wrapper of ``peft``."""
    names = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
    other_names = [
        name
        for name, child in module.named_children()
        if name not in names and any(True for _ in child.parameters())
    ]
    if other_names or "lora_A" not in module._modules:
        raise ShardingError(
            f"{type(module).__name__} of peft holds {', '.join(other_names) or 'no LoRA'}, and "
            "only the two factors of LoRA are sharded over tensor-parallel ranks. Use "
            "megatron_lightning.peft.LoRA, or set tensor_model_parallel_size to 1."
        )
    dropouts: nn.ModuleDict = module.lora_dropout  # type: ignore[assignment]
    for name, lora_A in module.lora_A.named_children():  # type: ignore[union-attr]
        dropout = dropouts._modules.get(name)
        if not isinstance(dropout, Dropout):
            # Replaces torch's dropout, because torch's draws equal numbers for all shards.
            dropouts[name] = Dropout(getattr(dropout, "p", 0.0))
        yield Factors(ALL_ROWS, lora_A, module.lora_B[name], dropouts[name])  # type: ignore[index,arg-type]


def divide_column(
    module: nn.Module,
    style_of: Callable[[str], Style],
    context: ParallelContext,
    plan: ShardingPlan,
    *,
    copies_input: bool,
) -> None:
    """Divide the adapters of a column-parallel layer.

    Args:
        module: The layer, or a wrapper around the layer.
        style_of: Name of a part -> style of the part's B.
        context: Groups of this rank.
        plan: The plan.
        copies_input: Whether the layer sums its input's gradient. False inside a ``ParallelInput``
            region.
    """
    shards_tokens = plan.is_sequence_parallel(context) and copies_input
    for part in factors_of(module):
        style_of(part.part).apply(part.lora_B, context, plan)
        if part.lora_magnitude is not None:
            style_of(part.part).apply(part.lora_magnitude, context, plan)
            if isinstance(part.lora_magnitude, SharedGroupsLinear):
                raise ShardingError(
                    "use_dora is set, and tensor-parallel ranks share the rows of a projection to "
                    "keys or values, since they outnumber its heads. Leave these layers out by "
                    "exclude_modules, use rsLoRA, or set tensor_model_parallel_size to at most the "
                    "number of query groups."
                )
        # A is replicated, and each rank's gradient of A comes from its own tokens, or its own rows
        # of B.
        if context.tp.size > 1 and (shards_tokens or not copies_input):
            partial_over(part.lora_A, context.tp)
        draw_from_stream(part.dropout, context, sharded=shards_tokens)


def divide_row(
    module: nn.Module,
    style: Style,
    context: ParallelContext,
    plan: ShardingPlan,
    *,
    splits_input: bool = False,
) -> None:
    """Divide the adapters of a row-parallel layer. ``splits_input``: the input is full."""
    for part in factors_of(module):
        style.apply(part.lora_A, context, plan)
        if plan.is_sequence_parallel(context):
            partial_over(part.lora_B, context.tp)
            if part.lora_magnitude is not None:
                partial_over(part.lora_magnitude, context.tp)
        draw_from_stream(part.dropout, context, sharded=context.tp.size > 1 and not splits_input)


def divide_experts(
    module: nn.Module,
    style: Style,
    context: ParallelContext,
    plan: ShardingPlan,
    *,
    divides_output: bool,
) -> None:
    """Shard the adapters of experts: both factors over ``ep``, and the factor with the sharded
    features over ``etp``. The gradient of the other factor is a partial sum over ``etp``.
    """
    for part in factors_of(module):
        sharded, full_factor = part.lora_A, part.lora_B
        if divides_output:
            sharded, full_factor = full_factor, sharded
        style.apply(sharded, context, plan)
        shape: tuple[int, ...] = tuple(full_factor.weight.shape)  # type: ignore[arg-type]
        spec = ShardSpec.split(shape, dim=0, size=context.ep.size, rank=context.ep.rank, axis="ep")
        take_shards(
            full_factor, full_factor, {"weight": replace(spec, partial_over=(context.etp.name,))}
        )


def divide_tokens(module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> None:
    """Divide the adapters of a full layer.

    Under sequence parallelism the layer sees sequence shards.
    """
    shards_tokens = plan.is_sequence_parallel(context)
    for part in factors_of(module):
        if shards_tokens:
            partial_over(part.lora_A, context.tp)
            partial_over(part.lora_B, context.tp)
            if part.lora_magnitude is not None:
                partial_over(part.lora_magnitude, context.tp)
        draw_from_stream(part.dropout, context, sharded=shards_tokens)


def partial_over(module: nn.Module, group: AxisGroup) -> nn.Module:
    """Declare the gradients of a full layer partial sums over ``group``. Return the layer."""
    parameters = module.named_parameters(recurse=False)
    module.shard_specs = {  # type: ignore[assignment]
        n: ShardSpec.replicated(p.shape, partial_over=(group.name,)) for n, p in parameters
    }
    return module


def draw_from_stream(dropout: Dropout, context: ParallelContext, *, sharded: bool) -> None:
    """Draw a dropout's numbers from a stream of the rank, if the input differs between the ranks of
    a replica. ``sharded``: the input differs between tensor-parallel ranks.
    """
    if sharded or context.cp.size > 1:
        dropout.streams = context.rng
        dropout.stream_name = "model-parallel-rng" if sharded else "data-parallel-rng"
