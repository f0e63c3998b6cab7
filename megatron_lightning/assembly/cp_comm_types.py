"""Which attention module meets the keys of other ranks in which way, where each has one of its own.

A pipeline rank has some of the modules, and the list counts those of the full model. So each module
is given a row of its own in its plan, before the model is divided into stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from megatron_lightning.config import ContextExchange
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import ContextAttention
from megatron_lightning.parallel.sharding import ShardingPlan


def assign_cp_comm_types(
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    exchange: ContextExchange | Sequence[ContextExchange],
) -> dict[str, ShardingPlan]:
    """Return the plans with a row for each attention module that they bind, naming its entry of a
    list of types; with one type the plans as they are.

    Args:
        module: The full module.
        plans: Its plans by the paths of their modules.
        exchange: One type, or one for each bound module in the order of the full module.

    Raises:
        ConfigError: If the list has another length than there are bound modules.
    """
    if isinstance(exchange, str):
        return dict(plans)
    rows: dict[str, dict[str, ContextAttention]] = {}
    places: dict[int, int] = {}
    for owner, plan in plans.items():
        for path, child in module.get_submodule(owner).named_modules(remove_duplicate=False):
            style = plan.style_of(path)
            if isinstance(style, ContextAttention):
                place = places.setdefault(id(child), len(places))
                if place < len(exchange):
                    own = replace(style, cp_comm_type=exchange[place])
                    rows.setdefault(owner, {})[path] = own
    if len(places) != len(exchange):
        raise ConfigError(
            f"cp_comm_type lists {len(exchange)} types, and the sharding plan of "
            f"{type(module).__name__} binds {len(places)} attention modules to the "
            f"context-parallel ranks. List {len(places)}, in the order of the model, or one type "
            "for all, not in a list."
        )
    return {
        owner: replace(plan, modules={**rows.get(owner, {}), **plan.modules})
        for owner, plan in plans.items()
    }
