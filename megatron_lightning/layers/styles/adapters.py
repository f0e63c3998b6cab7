"""Division of a layer's adapters by styles, for our adapters and ``peft``'s.

The modules of an adapter have roles (:mod:`megatron_lightning.layers.adapters.part`). In LoRA, A is
the input and B the output, with h = A x [..., r]:

    column-parallel  B takes the style of W. A is full. Ranks copy or gather h, r numbers a token.
                     The gradient of A is a partial sum under sequence parallelism (A sees a shard
                     of the tokens) and inside a ``ParallelInput`` region (a rank's rows of B).
    row-parallel     A takes the style of W, so that h is reduced, or reduce-scattered. B is full.
                     The gradient of B is a partial sum under sequence parallelism.

Row factors (lengths of DoRA) are divided as B is. Numbers of the r features, between A and B, are
full, and their gradient is that of the full one of A and B.

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
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.linear.parallel_linear import SharedGroupsLinear
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.attachments import base_layer
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style, take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec

Modules = tuple[nn.Module, ...]


class Roles(NamedTuple):
    """One adapter of a layer, by the roles of its modules."""

    part: str
    """Name of the matrix in the layer's weight. "all": all rows."""
    inputs: Modules
    outputs: Modules
    dropout: Dropout
    between: Modules = ()
    row_factors: Modules = ()


def roles_of(module: nn.Module) -> list[Roles]:
    """Return the adapters of a layer, or of the layer inside a ``peft`` wrapper.

    Raises:
        ShardingError: If the wrapper holds something else than the two factors of LoRA.
    """
    adapters = adapters_of(module)
    if adapters is not None:
        return [
            Roles(name, part.inputs, part.outputs, part.dropout, part.between, part.row_factors)
            for name, part in adapters.parts.items()
        ]
    if base_layer(module) is module:
        return []
    return list(_roles_in_peft(module))


def _roles_in_peft(module: nn.Module) -> Iterator[Roles]:
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
        yield Roles(ALL_ROWS, (lora_A,), (module.lora_B[name],), dropouts[name])  # type: ignore[index,arg-type]


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
    for part in roles_of(module):
        for layer in (*part.outputs, *part.row_factors):
            style_of(part.part).apply(layer, context, plan)
        if any(isinstance(layer, SharedGroupsLinear) for layer in part.row_factors):
            raise ShardingError(
                "adapters train a number for each row (DoRA, VeRA), and tensor-parallel ranks "
                "share the rows of a projection to keys or values, since they outnumber its heads. "
                "Leave these layers out by exclude_modules, use LoRA, or set "
                "tensor_model_parallel_size to at most the number of query groups."
            )
        # Inputs are full, and each rank's gradient of them comes from its own tokens, or its own
        # rows of the outputs.
        if context.tp.size > 1 and (shards_tokens or not copies_input):
            for layer in (*part.inputs, *part.between):
                partial_over(layer, context.tp)
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
    for part in roles_of(module):
        for layer in part.inputs:
            style.apply(layer, context, plan)
        if plan.is_sequence_parallel(context):
            for layer in (*part.between, *part.outputs, *part.row_factors):
                partial_over(layer, context.tp)
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
    ep = {"size": context.ep.size, "rank": context.ep.rank}
    for part in roles_of(module):
        sharded, full_factors = part.inputs, part.outputs
        if divides_output:
            sharded, full_factors = full_factors, sharded
        for factor in sharded:
            style.apply(factor, context, plan)
        for factor in full_factors:
            shape: tuple[int, ...] = tuple(factor.weight.shape)  # type: ignore[arg-type]
            spec = ShardSpec.split(shape, dim=0, axis="ep", **ep)
            spec = replace(spec, partial_over=(context.etp.name,))
            take_shards(factor, factor, {"weight": spec})


def divide_tokens(module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> None:
    """Divide the adapters of a full layer.

    Under sequence parallelism the layer sees sequence shards.
    """
    shards_tokens = plan.is_sequence_parallel(context)
    for part in roles_of(module):
        if shards_tokens:
            for layer in (*part.inputs, *part.between, *part.outputs, *part.row_factors):
                partial_over(layer, context.tp)
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
