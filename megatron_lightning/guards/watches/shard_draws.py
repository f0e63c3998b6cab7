"""Random numbers drawn by hooks into shards of parameters.

``nn.init.normal_(self.fc1.weight)`` in a hook draws on every rank from the random stream shared by
the ranks of a replica. If the ranks hold different shards of ``fc1.weight``, every rank receives
the first numbers of the stream, and the full weight repeats a block of rows. Neither initialization
nor training makes shards bit-equal, with two exceptions: shards of one or two values, and shards
already equal at setup (KV heads copied to every rank, or a tiled pattern).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.checks.replicas import diverged, fingerprints
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec


def check_draws(
    module: nn.Module,
    specs: Mapping[str, ShardSpec],
    context: ParallelContext,
    equal_before: Collection[tuple[str, str]],
) -> None:
    """Check that ranks with different shards of a parameter hold different values. A collective.

    Args:
        module: The sharded module.
        specs: Spec of every parameter by name.
        context: Groups of this rank.
        equal_before: Result of :func:`equal_shards` at setup: shards allowed to be equal.

    Raises:
        ShardingError: If shards have become equal, and are not constant.
    """
    equal_names = equal_shards(module, specs, context)
    for group in (context.tp, context.dp_cp):
        # Shards equal from the start (zeros, ones) are no draw.
        drawn = [
            n for n, axis in equal_names if axis == group.name and (n, axis) not in equal_before
        ]
        if drawn:
            raise ShardingError(
                f"{', '.join(drawn[:3])}{', …' if len(drawn) > 3 else ''}: the {group.size} ranks "
                f"that hold different shards over {group.name} hold equal values, and did not when "
                "the strategy was set up. A hook drew random numbers into the shards (nn.init, "
                "normal_), and every rank drew the same ones. Initialize the weight in __init__ or "
                "configure_model, where it is full, or draw the full weight on every rank and copy "
                "this rank's rows or columns."
            )


def equal_shards(
    module: nn.Module, specs: Mapping[str, ShardSpec], context: ParallelContext
) -> list[tuple[str, str]]:
    """Return name and axis of parameters whose different shards over an axis have equal,
    non-constant values. A collective.
    """
    dense = {
        name: parameter
        for name, parameter in module.named_parameters()
        if name in specs and not specs[name].is_expert and not is_quantized(parameter.dtype)
    }
    over_tp = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in dense.items()
        if "tp" in specs[name].sharded_over
    }
    over_data = {
        name: _first_rows(parameter)
        for name, parameter in dense.items()
        if isinstance(parameter, DTensor)
    }
    return [*_equal(over_tp, context.tp), *_equal(over_data, context.dp_cp)]


def _first_rows(parameter: DTensor) -> Tensor:
    """Return as many rows of this rank's shard as the last rank has."""
    num_ranks = parameter.device_mesh.size()
    per_rank = -(-parameter.shape[0] // num_ranks)
    return parameter.to_local()[: max(0, parameter.shape[0] - per_rank * (num_ranks - 1))]


def _equal(shards: Mapping[str, Tensor], group: AxisGroup) -> list[tuple[str, str]]:
    if not shards or group.process_group is None:
        return []
    apart = set(diverged(fingerprints(list(shards.values())), group))
    equal_names = [name for index, name in enumerate(shards) if index not in apart]
    return [(name, group.name) for name in equal_names if _varies(shards[name])]


def _varies(shard: Tensor) -> bool:
    """Return whether a shard holds more than two distinct values.

    The first step of an optimizer such as Adam moves every value of a shard of ones by the learning
    rate, up or down, so that small shards often become equal. ``unique`` would count every NaN.
    """
    return shard.numel() > 2 and torch.unique(shard.nan_to_num()).numel() > 2
