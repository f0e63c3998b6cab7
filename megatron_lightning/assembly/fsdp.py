"""``data_parallel="fsdp"``: FSDP2 over the pipeline units of an assembled module.

Without a pipeline, the units are the same and the module with the list of units is the root. A
module without units is sharded by size (``sharded_modules``).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.sharded_modules import divide_units, find_sharded
from megatron_lightning.config import DataParallelOptions, PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.fsdp.fully_sharded import ShardedUnits
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.materialize import initial_value, is_left_empty, materialize


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameters of the module are shards."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local_size(module: nn.Module) -> int:
    """Return how many elements of the module's parameters are on this rank."""
    local_tensors = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(tensor.numel() for tensor in local_tensors)


def check_unsharded(module: nn.Module) -> None:
    """Check that no earlier strategy sharded the module.

    Raises:
        ConfigError: If an earlier strategy did.
    """
    if is_sharded(module):
        raise ConfigError(
            f'{type(module).__name__} was sharded by an earlier Trainer with data_parallel="fsdp" '
            "and has no full parameters "
            "to start from. Create a new module, and load a checkpoint into it."
        )


def shard_units(
    module: nn.Module,
    part: Part,
    context: ParallelContext,
    options: DataParallelOptions,
    pipeline: PipelineOptions,
    *,
    micro_batches: bool,
    keeps_frozen: bool = True,
) -> ShardedUnits:
    """Shard the units of this rank's stages over the data-parallel ranks.

    The assembled module has the final dtype, and is on the device or on ``meta``. Parameters on
    ``meta`` are filled a full parameter at a time. ``micro_batches``: a step runs several
    micro-batches. ``keeps_frozen``: frozen parameters are never trained, and need no fp32 main
    params.

    Raises:
        ConfigError: If nothing can be sharded.
    """
    root: str | None = None
    tied = set[str]()  # with copies on other stages
    # FSDP2 shards what is called as a unit. Under a pipeline the stage's own units serve.
    if part.partition is None:
        stages = {0: find_sharded(module, pipeline)}
        root = stages[0].path
    else:
        tied = {*part.tied, *part.tied.values()}
        stages = {
            stage: divide_units(module, units) for stage, units in part.units_of_stage.items()
        }
    units = ShardedUnits(
        module,
        {stage: sharded.units for stage, sharded in stages.items()},
        root=root,
        excluded={*tied, *part.replicated_over_pp},
        full={n: why for sharded in stages.values() for n, why in sharded.full.items()},
        specs=part.specs,
        context=context,
        options=options,
        micro_batches=micro_batches,
        keeps_frozen=keeps_frozen,
        compute_dtype=_low_dtype(module if root is None else module.get_submodule(root)),
    )
    shards = {
        name: parameter
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
    }
    # A full value is drawn, its shard kept, and the full value freed before the next is drawn.
    for name in units.unfilled:
        if is_left_empty(module, name):
            continue
        shard, spec = shards[name], part.specs[name]
        value = initial_value(module, name, spec.global_shape, shard.dtype, context.device)
        units.fill(name, shard, value, spec)
    materialize(module, context.device)
    return units


def _low_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of most parameter elements, if lower than fp32."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    dtype = max(sizes, key=lambda key: sizes[key], default=torch.float32)
    return dtype if main_dtype(dtype) != dtype else None
