"""The modules sharded by FSDP2, and this rank's shard of each parameter.

A pipeline unit is such a module. Experts are sharded over other ranks (``edp``) than the rest of
the unit (``dp-cp``). So experts inside a unit are separate modules with separate gathers:

    a layer: attention, router, norms     over dp-cp
      its experts                         over edp

A parameter is sharded along dim 0. If the number of experts is not divisible by the number of
ranks, the first divisible dim is sharded instead: each rank then has a shard of every expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megatron_lightning.compat import GradientHooks, set_grad_dtype
from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.stepping.reassigned_data import ShardedParameter
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.parallel.shards.stored_weight import StoredWeight

_CONTAINERS = nn.ModuleList | nn.ModuleDict


class Division(NamedTuple):
    """A module on the way to becoming a :class:`Unit`."""

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    """Parameters of the module sharded in this unit."""
    data_axes: str
    """The sharding ranks: see ``ShardSpec.data_axes``."""


class Unit:
    """A module with parameters sharded by FSDP2.

    Args:
        path: Path of the module.
        module: The module, an nn.Module and an FSDPModule.
        names: Names of the parameters sharded in this unit.
        groups: The sharding ranks.
    """

    def __init__(self, path: str, module: Any, names: Set[str], groups: DataGroups) -> None:
        self.path = path
        self.module = module
        self.groups = groups
        self.shards: dict[str, DTensor] = {
            n: p for n, p in module.named_parameters(path) if n in names and isinstance(p, DTensor)
        }
        """Name -> this rank's shard of a parameter."""
        for shard in self.shards.values():
            shard.__class__ = ShardedParameter
        self.gathered: dict[str, nn.Parameter] = {}
        """Name -> the full parameter, a leaf of autograd, from the first call on. The object stays
        the same. Gathers allocate and free the object's memory ("FSDP and autograd" in
        torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""

    def begin_call(self) -> None:
        """Prepare the full parameters in the first call. A collective, in place of FSDP2's first
        gather.
        """
        if self.gathered:
            return
        self.module.unshard()
        self.gathered = {
            name: p for name, p in self.module.named_parameters(self.path) if name in self.shards
        }
        for name, gathered in self.gathered.items():
            GradientHooks(self.shards[name]).move(gathered, self.shards[name])
            set_grad_dtype(gathered, main_dtype(gathered.dtype))

    def __str__(self) -> str:
        names = list(self.shards)
        return (
            f"{self.path} (with the parameters "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        )


def divisions(unit: nn.Module, manageable: Mapping[int, str]) -> list[Division]:
    """Return the sharded modules of a pipeline unit, inner modules first.

    Args:
        unit: The pipeline unit, a called module.
        manageable: id -> ``data_axes`` of the shardable parameters.
    """
    experts = {key for key, axes in manageable.items() if axes == "edp"}
    inner = [
        Division(module, managed, "edp")
        for module in _expert_modules(unit, experts)
        if (managed := _managed(module, experts))
    ]
    # FSDP2 skips inner modules sharded before.
    inner_ids = {id(p) for division in inner for p in division.module.parameters()}
    managed_parameters = _managed(unit, manageable.keys() - experts - inner_ids)
    return [*inner, *([Division(unit, managed_parameters, "dp-cp")] if managed_parameters else [])]


def _expert_modules(module: nn.Module, experts: Set[int]) -> Iterator[nn.Module]:
    """Yield the outermost called modules with nothing but experts' parameters, or with direct
    experts' parameters.
    """
    if not isinstance(module, _CONTAINERS) and _has_only(module, experts):
        yield module
        return
    for child in module.children():
        parameter_ids = {id(p) for p in child.parameters(recurse=False)}
        if isinstance(child, _CONTAINERS) or experts.isdisjoint(parameter_ids):
            yield from _expert_modules(child, experts)
        else:
            yield child


def _has_only(module: nn.Module, parameters: Set[int]) -> bool:
    parameter_ids = {id(p) for p in module.parameters()}
    return bool(parameter_ids) and parameter_ids <= parameters


def _managed(unit: nn.Module, manageable: Set[int]) -> list[nn.Parameter]:
    """Return the parameters of a unit in the most frequent dtype by elements. FSDP2 shards a single
    dtype per unit.
    """
    dtypes = Counter[torch.dtype]()
    for parameter in unit.parameters():
        dtypes[parameter.dtype] += parameter.numel()
    main = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    return [
        p
        for p in unit.parameters()
        if id(p) in manageable and p.dtype == main and p.is_floating_point()
    ]


def callable_modules(unit: nn.Module) -> list[nn.Module]:
    """Return the unit, or the entries of a never called container."""
    if isinstance(unit, _CONTAINERS):
        return [child for entry in unit.children() for child in callable_modules(entry)]
    return [unit]


def allocate(path: str, unit: nn.Module, device: torch.device) -> list[str]:
    """Allocate the parameters sharded on ``meta``, without filling. Return the names."""
    shards = {
        name: p for name, p in unit.named_parameters() if isinstance(p, DTensor) and p.is_meta
    }
    memory = {name: torch.empty_like(shard, device=device) for name, shard in shards.items()}
    # FSDP2 looks at the shards again after a load.
    unit.load_state_dict(memory, strict=False, assign=True)
    return [f"{path}.{name}" if path else name for name in shards]


def sharded_dim(shape: Sequence[int], num_ranks: int, data_axes: str) -> int:
    """Return the sharded dim of a parameter, given the number of ranks."""
    if data_axes != "edp":
        return 0
    # FSDP2 shards dims other than the first only evenly.
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


def local_shard(tensor: DTensor) -> tuple[Tensor, Box]:
    """Return this rank's shard of a sharded tensor, and the shard's range in the tensor."""
    local_tensor = tensor.to_local().detach()
    [placement] = tensor.placements
    dim = placement.dim if isinstance(placement, Shard) else 0
    per_rank = -(-tensor.shape[dim] // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * per_rank, tensor.shape[dim])
    offset = tuple(first if axis == dim else 0 for axis in range(tensor.dim()))
    return local_tensor, Box(offset, tuple(local_tensor.shape))


class StageRoot(nn.Module):
    """FSDP2 root module of a pipeline stage: the units, called through a function."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``run(*args, **kwargs)``."""
        return run(*args, **kwargs)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module has parameters sharded by FSDP2."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def check_stored(path: str, parameter: Tensor, num_ranks: int, data_axes: str) -> None:
    """Check that ranks hold equal shards of a weight in few bits: FSDP2 pads values only."""
    dim = sharded_dim(parameter.shape, num_ranks, data_axes)
    if isinstance(parameter, StoredWeight) and parameter.shape[dim] % num_ranks:
        raise ShardingError(
            f"{path} has a weight of shape {tuple(parameter.shape)} in few bits (base of LoRA), "
            f"and {num_ranks} data-parallel ranks do not divide its {parameter.shape[dim]} rows. "
            'Set data_parallel to "zero1", base to None, or another number of ranks.'
        )


def check_sizes(unit: str, before: list[int], after: list[int]) -> None:
    """Check that a unit passes nothing on through the arguments: FSDP2 gives units copies."""
    if before != after:
        raise ShardingError(
            f"{unit} changes a list or dict that it was given, and FSDP2 gives units copies, so "
            "that later units would not see it. Return what it hands on, or set "
            'data_parallel="zero1".'
        )
