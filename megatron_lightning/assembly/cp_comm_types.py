"""Assign a ``cp_comm_type`` to each attention module.

A pipeline rank has only a part of the modules, while the list counts the modules of the full model.
Each attention module therefore receives a row of its own in the plan, before the model is
partitioned into stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from megatron_lightning.config import CPCommType
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import ContextAttention
from megatron_lightning.parallel.shards.sharding import ShardingPlan


def assign_cp_comm_types(
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    cp_comm_type: CPCommType | Sequence[CPCommType],
) -> dict[str, ShardingPlan]:
    """Return the plans with a row for each bound attention module, naming the module's entry in the
    list of types. With a single type, return the plans unchanged.

    Args:
        module: The full module.
        plans: Plans of the module by path.
        cp_comm_type: A single type, or a type for each bound module in the order of the full
            module.

    Raises:
        ConfigError: If the list has another length than there are bound modules.
    """
    if isinstance(cp_comm_type, str):
        return dict(plans)
    rows: dict[str, dict[str, ContextAttention]] = {}
    places: dict[int, int] = {}
    for owner, plan in plans.items():
        for path, child in module.get_submodule(owner).named_modules(remove_duplicate=False):
            style = plan.style_of(path)
            if isinstance(style, ContextAttention):
                # A module with several paths counts once. Places are in the order of the model, as
                # the list of types is.
                place = places.setdefault(id(child), len(places))
                if place < len(cp_comm_type):
                    own_style = replace(style, cp_comm_type=cp_comm_type[place])
                    rows.setdefault(owner, {})[path] = own_style
    if len(places) != len(cp_comm_type):
        raise ConfigError(
            f"cp_comm_type lists {len(cp_comm_type)} types, and the sharding plan of "
            f"{type(module).__name__} binds {len(places)} attention modules to the "
            f"context-parallel ranks. List {len(places)}, in the order of the model, or one type "
            "for all, not in a list."
        )
    return {
        # Rows for single modules come before the plan's own patterns: the first match decides.
        owner: replace(plan, modules={**rows.get(owner, {}), **plan.modules})
        for owner, plan in plans.items()
    }
