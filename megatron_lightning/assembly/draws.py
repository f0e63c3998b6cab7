"""Random numbers that hooks drew into shards of parameters.

``nn.init.normal_(self.fc1.weight)`` in a hook draws on every rank from the stream that the ranks of
a replica share. Where the ranks hold different shards of ``fc1.weight``, all of them receive the
first numbers of that stream, and the full weight repeats a block of rows. No initialization and no
training makes shards bit-equal, unless they are constant.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.replicas import diverged, fingerprint
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.gemm import is_code
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.spec import ShardSpec


def check_draws(
    module: nn.Module, specs: Mapping[str, ShardSpec], context: ParallelContext
) -> None:
    """Check that ranks that hold different shards of a parameter hold different values; a
    collective.

    Raises:
        ShardingError: If shards are equal and not constant.
    """
    dense = {
        name: parameter
        for name, parameter in module.named_parameters()
        if name in specs and not specs[name].is_expert and not is_code(parameter.dtype)
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
    _check(over_tp, context.tp)
    _check(over_data, context.dp_cp)


def _first_rows(parameter: DTensor) -> Tensor:
    """Return as many rows of this rank's shard as the last rank has."""
    num_ranks = parameter.device_mesh.size()
    per_rank = -(-parameter.shape[0] // num_ranks)
    return parameter.to_local()[: max(0, parameter.shape[0] - per_rank * (num_ranks - 1))]


def _check(shards: Mapping[str, Tensor], group: AxisGroup) -> None:
    if not shards or group.process_group is None:
        return
    marks = torch.stack([fingerprint(shard) for shard in shards.values()])
    apart = set(diverged(marks, group))
    equal = [name for index, name in enumerate(shards) if index not in apart]
    drawn = [name for name in equal if _varies(shards[name])]
    if drawn:
        raise ShardingError(
            f"{', '.join(drawn[:3])}{', …' if len(drawn) > 3 else ''}: the {group.size} ranks that "
            f"hold different shards over {group.name} hold equal values. A hook drew random "
            "numbers into the shards (nn.init, normal_), and every rank drew the same ones. "
            "Initialize the weight in __init__ or configure_model, where it is full, or draw the "
            "full weight on every rank and copy this rank's rows or columns."
        )


def _varies(shard: Tensor) -> bool:
    """Return whether a shard has more than one distinct value in enough elements."""
    return shard.numel() > 1 and bool((shard != shard.flatten()[0]).any())
