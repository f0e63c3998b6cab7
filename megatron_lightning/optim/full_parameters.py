"""The parameters shardable by FSDP2, and the parameters kept full on every rank, with the
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_lightning.parallel.shards.parameters import num_names
from megatron_lightning.parallel.shards.spec import ShardSpec

IN_ONE_PIECE = (nn.RNNBase,)
"""Modules with views of all weights in one piece of memory. Shards are not in one piece."""
_LISTED = 3


def can_be_extended(module: nn.Module) -> bool:
    """Return whether FSDP2 can replace the module's class.

    Python refuses the assignment if the object layouts differ, as with ``class Block(ABC,
    nn.Module)``.
    """
    kind = type(module)
    if isinstance(module, FSDPModule):
        return True
    try:
        module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        module.__class__ = kind
    except (TypeError, RuntimeError):
        return False
    return True


def shardable(
    module: nn.Module,
    units: Iterable[Sequence[nn.Module]],
    specs: Mapping[str, ShardSpec],
    excluded: Set[str],
) -> dict[int, str]:
    """Return id -> ``data_axes`` of the parameters shardable by FSDP2 within a unit.

    A parameter must be reachable only through the unit: no name outside of the unit, and no second
    name inside. A unit itself may have several paths.

    Args:
        module: The assembled module.
        units: The units, by stage.
        specs: Specs of all parameters.
        excluded: Names of parameters with a copy on another pipeline rank.
    """
    names = num_names(module)
    paths = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    inner_ids = set[int]()
    for unit in (unit for stage in units for unit in stage):
        uses = num_names(unit)
        num_paths = paths[id(unit)]
        # One name inside the unit, and as many paths in all as the unit itself has: no way to the
        # parameter leads around the unit, whose hooks gather it.
        inner_ids |= {key for key, n in uses.items() if n == 1 and names[key] == num_paths}
    in_one_piece = _in_one_piece(module)
    return {
        id(parameter): specs[name].data_axes
        for name, parameter in module.named_parameters()
        if id(parameter) in inner_ids
        and name not in in_one_piece
        and name not in excluded
        and specs[name].global_shape
    }


def _in_one_piece(module: nn.Module) -> set[str]:
    return {
        name
        for path, child in module.named_modules()
        if isinstance(child, IN_ONE_PIECE)
        for name, _ in child.named_parameters(path)
    }


def explain_full(
    module: nn.Module,
    specs: Mapping[str, ShardSpec],
    excluded: Set[str],
    sharded: Set[str],
    known: Mapping[str, str],
) -> dict[str, str]:
    """Return the reason for staying full of each parameter, by name.

    Args:
        module: The assembled module.
        specs: Specs of all parameters.
        excluded: Names of parameters with a copy on another pipeline rank.
        sharded: Names of the sharded parameters.
        known: Reasons known before.
    """
    uses = num_names(module)
    in_one_piece = _in_one_piece(module)

    # The first reason that applies. Reasons of the caller come first, since they know of more than
    # the parameter.
    def why(name: str, parameter: nn.Parameter) -> str:
        if name in known:
            return known[name]
        if name in in_one_piece:
            return "of an RNN, whose weights stay in one piece of memory"
        if uses[id(parameter)] > 1:
            return "under several names"
        if name in excluded:
            return "on several pipeline stages"
        if not specs[name].global_shape:
            return "a scalar"
        return "outside of the units, or of another dtype than most of its unit"

    return {
        name: why(name, parameter)
        for name, parameter in module.named_parameters()
        if name not in sharded
    }


def describe_full(full: Mapping[str, str]) -> str:
    """Return a sentence with the names of the full parameters. "" if none is full."""
    by_reason: dict[str, list[str]] = {}
    for name, why in full.items():
        by_reason.setdefault(why, []).append(name)
    said = [
        f"{', '.join(names[:_LISTED])}"
        f"{f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''} ({why})"
        for why, names in by_reason.items()
    ]
    return f"Full on every rank: {'; '.join(said)}." if said else ""
