"""The modules whose parameters FSDP2 shards, and what a rank keeps of each parameter.

A pipeline unit is one such module. Experts in it, which other ranks hold as well (``edp``) than the
rest of it (``dp-cp``), are modules of their own inside, each with its own gathers:

    a layer: attention, router, norms     over dp-cp
      its experts                         over edp

A parameter is divided along dim 0. Where its experts are fewer than the ranks, or do not divide by
them, a later dim that divides is: each rank then has a part of every expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megatron_lightning.compat import GradientHooks, set_grad_dtype
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.stepping.rebound import ShardedParameter
from megatron_lightning.parallel.spec import Box

_CONTAINERS = nn.ModuleList | nn.ModuleDict


class Division(NamedTuple):
    """A module that becomes a :class:`Unit`."""

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    """Those of its parameters that are sharded with it."""
    data_axes: str
    """Over which ranks: see ``ShardSpec.data_axes``."""


class Unit:
    """One module whose parameters FSDP2 shards.

    Args:
        path: Path of the module.
        module: The module, an nn.Module and an FSDPModule.
        names: Names of the parameters that are sharded with it.
        groups: The ranks over which they are.
    """

    def __init__(self, path: str, module: Any, names: Set[str], groups: DataGroups) -> None:
        self.path = path
        self.module = module
        self.groups = groups
        self.shards: dict[str, DTensor] = {
            n: p for n, p in module.named_parameters(path) if n in names and isinstance(p, DTensor)
        }
        """Name -> what this rank keeps of a parameter."""
        for shard in self.shards.values():
            shard.__class__ = ShardedParameter
        self.gathered: dict[str, nn.Parameter] = {}
        """Name -> the full parameter, a leaf of autograd, from the first call on. It stays the same
        object, whose memory comes and goes with the gathers ("FSDP and autograd" in
        torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""

    def begin_call(self) -> None:
        """Prepare the full parameters in the first call; a collective, which spares FSDP2 its
        own.
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
    """Return the modules into which a pipeline unit is divided, inner ones first.

    Args:
        unit: The pipeline unit, a module that is called.
        manageable: id -> ``data_axes`` of the parameters that may be sharded.
    """
    experts = {key for key, axes in manageable.items() if axes == "edp"}
    inner = [
        Division(module, managed, "edp")
        for module in _expert_modules(unit, experts)
        if (managed := _managed(module, experts))
    ]
    # FSDP2 leaves modules inside that are sharded already to themselves.
    taken = {id(p) for division in inner for p in division.module.parameters()}
    own = _managed(unit, manageable.keys() - experts - taken)
    return [*inner, *([Division(unit, own, "dp-cp")] if own else [])]


def _expert_modules(module: nn.Module, experts: Set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules that are called and have nothing but experts' parameters, or
    that hold some themselves.
    """
    if not isinstance(module, _CONTAINERS) and _has_only(module, experts):
        yield module
        return
    for child in module.children():
        own = {id(p) for p in child.parameters(recurse=False)}
        if isinstance(child, _CONTAINERS) or experts.isdisjoint(own):
            yield from _expert_modules(child, experts)
        else:
            yield child


def _has_only(module: nn.Module, parameters: Set[int]) -> bool:
    own = {id(p) for p in module.parameters()}
    return bool(own) and own <= parameters


def _managed(unit: nn.Module, manageable: Set[int]) -> list[nn.Parameter]:
    """Return the parameters of a unit that FSDP2 can shard: those of the dtype that most elements
    have.
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
    """Return the unit, or the entries of a container, which is never called."""
    if isinstance(unit, _CONTAINERS):
        return [child for entry in unit.children() for child in callable_modules(entry)]
    return [unit]


def allocate(path: str, unit: nn.Module, device: torch.device) -> list[str]:
    """Allocate the parameters that were sharded on ``meta``, without filling them; return their
    names.
    """
    shards = {
        name: p for name, p in unit.named_parameters() if isinstance(p, DTensor) and p.is_meta
    }
    memory = {name: torch.empty_like(shard, device=device) for name, shard in shards.items()}
    # FSDP2 looks at its shards again after this.
    unit.load_state_dict(memory, strict=False, assign=True)
    return [f"{path}.{name}" if path else name for name in shards]


def divided_dim(shape: Sequence[int], num_ranks: int, data_axes: str) -> int:
    """Return the dim along which a parameter is divided over ``num_ranks``."""
    if data_axes != "edp":
        return 0
    # FSDP2 divides other dims than the first evenly only.
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


def local_part(tensor: DTensor) -> tuple[Tensor, Box]:
    """Return this rank's part of a sharded tensor, and its range in that tensor."""
    own = tensor.to_local().detach()
    [placement] = tensor.placements
    dim = placement.dim if isinstance(placement, Shard) else 0
    per_rank = -(-tensor.shape[dim] // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * per_rank, tensor.shape[dim])
    offset = tuple(first if other == dim else 0 for other in range(tensor.dim()))
    return own, Box(offset, tuple(own.shape))
