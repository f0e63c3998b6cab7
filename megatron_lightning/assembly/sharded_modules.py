"""The modules sharded by ``data_parallel="fsdp"``, and the parameters that stay full.

The units of a pipeline are sharded modules. A model without units (a block called several times, a
single big module, branches), and modules beside the pipelined module, are sharded by size:

    a module                                                        becomes
    a list, or a class without a forward                            the results for the entries
    a tower of a fit with images, which some ranks do not call      full parameters
    of a class that torch cannot extend                             the results for the children
    with more than 1 / 8 of all elements, and with children         the results for the children
    of fewer than 1 / 1,000 of all elements, and than 65,536        full parameters
    any other                                                       a unit

Units do not overlap. FSDP2 gathers a unit at each call of the unit, so a unit is small beside the
model. A module stays full if starting the module's gather takes longer than sending the weights. A
module that reads weights of the modules inside is a single unit. A layer stays full if code further
outside reads the layer's weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.gathered import BY_INDEX, weights_read
from megatron_lightning.models.plans.hf_towers import is_marked
from megatron_lightning.optim.full_parameters import IN_ONE_PIECE, can_be_extended, describe_full
from megatron_lightning.pipeline.schedules.partition import unit_names
from megatron_lightning.pipeline.stages.units import find_pipelined

_LARGEST = 8
"""A module with more than 1 / ``_LARGEST`` of all elements is sharded by children, if possible."""
_SMALLEST = 1000
"""A module with fewer than 1 / ``_SMALLEST`` of all elements stays full, if the module also has
fewer than ``_SMALL`` elements."""
_SMALL = 2**16
"""Elements of 256 KiB of fp32. A network of 10 GB/s sends 256 KiB in 26
microseconds, about the time to start a collective."""
_LISTS = (nn.ModuleList, nn.ModuleDict)
_CALLS_CHILDREN = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
"""Modules of torch with a forward that calls the modules inside. Forwards of other modules of torch
may read weights of the modules inside."""


_OF_TOWER = "of a tower that ranks without images do not call"


class ShardedModules(NamedTuple):
    """Units to shard with FSDP, and parameters that every rank keeps in full."""

    path: str
    """Path of the module whose call runs units. "": each unit is called by itself."""
    units: Sequence[str]
    """Paths of the units, without overlap."""
    full: dict[str, str]
    """Name of a parameter in no unit -> why."""


def find_sharded(module: nn.Module, options: PipelineOptions) -> ShardedModules:
    """Find the units of a module without a pipeline.

    Raises:
        ConfigError: If nothing can be sharded, or the units in ``options`` contradict the module.
    """
    try:
        path, _, lists = find_pipelined(module, options.units or ())
    except ConfigError:
        if options.units:
            raise
        path, lists = None, ()
    prefix = f"{path}." if path else ""
    division = _Division(module)
    division.add_units(prefix + unit for unit in unit_names(lists))
    division.add("", done=path)
    if not division.units:
        raise ConfigError(
            f'data_parallel="fsdp" finds no module of {type(module).__name__} to shard. '
            f"{describe_full(division.full)} "
            'Set data_parallel="zero1", which shards the gradients and the optimizer state of any '
            "model."
        )
    return ShardedModules(path or "", division.units, division.full)


def divide_units(module: nn.Module, units: Iterable[str]) -> ShardedModules:
    """Return the sharded modules among pipeline units."""
    division = _Division(module)
    division.add_units(units)
    return ShardedModules("", division.units, division.full)


class _Division:
    """The sharded modules of a model.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.units: list[str] = []
        self.full: dict[str, str] = {}
        """Name of a parameter in no unit -> why."""
        self._root = root
        self._modules = dict(root.named_modules())  # a shared module has a single path
        total = _size(root)
        self._largest = total // _LARGEST
        self._smallest = min(_SMALL, total // _SMALLEST)
        self._reads = {
            kind: weights_read(kind.__mro__) for kind in map(type, self._modules.values())
        }

    def add_units(self, paths: Iterable[str]) -> None:
        """Add units of a pipeline. A unit is sharded by its children only if torch cannot
        extend the unit's class, or the unit has no forward.
        """
        for path in paths:
            module = self._root.get_submodule(path)
            if self._is_in_tower(path):
                self._keep(module, path, _OF_TOWER)
            elif isinstance(module, _LISTS):
                self.add_units(f"{path}.{name}" for name, _ in module.named_children())
            elif can_be_extended(module) and _has_forward(module):
                self.units.append(path)
            else:
                self.add(path)

    def add(self, path: str, done: str | None = None) -> None:
        """Add the results of dividing a module, without the module at the path ``done``."""
        module = self._modules.get(path)
        if module is None or path == done or not _has_parameters(module):
            return
        if is_marked(module):
            self._keep(module, path, _OF_TOWER)
            return
        why = self._obstacle(module, path)
        holds_done = done is not None and f"{done}.".startswith(f"{path}." if path else "")
        if why is None and self._is_whole(module) and not holds_done:
            if _size(module) < self._smallest:
                self._keep(module, path, f"fewer than {self._smallest:,} elements in a module")
            else:
                self.units.append(path)
        elif _is_closed(module):
            self._keep(module, path, why)
        else:
            self._keep(module, path, why or "read by a module that is sharded", recurse=False)
            for name, _ in module.named_children():
                self.add(f"{path}.{name}" if path else name, done)

    def _is_in_tower(self, path: str) -> bool:
        """Return whether a module is, or is in, a module that ranks without images do not call."""
        segments = path.split(".")
        around = (".".join(segments[:end]) for end in range(1, len(segments) + 1))
        return any(is_marked(self._root.get_submodule(one)) for one in around)

    def _keep(self, module: nn.Module, path: str, why: str | None, *, recurse: bool = True) -> None:
        for name, _ in module.named_parameters(path, recurse=recurse):
            self.full[name] = why or ""

    def _obstacle(self, module: nn.Module, path: str) -> str | None:
        """Return why a module cannot be a unit."""
        if isinstance(module, IN_ONE_PIECE):
            return f"{type(module).__name__}, whose weights stay in one piece of memory"
        if not path or isinstance(module, _LISTS) or not _has_forward(module):
            return f"read outside of a forward of {type(module).__name__}"
        if not can_be_extended(module):
            return f"of {type(module).__name__}, a class that torch cannot extend"
        inner_modules = set(module.modules())
        outer_kinds = {
            type(module_outside)
            for module_outside in self._root.modules()
            if module_outside not in inner_modules
        }
        names_read = set[str]().union(*(self._reads[kind] for kind in outer_kinds))
        for inner, child in module.named_modules(prefix=path):
            if "weight" in child._parameters and _name(inner) in names_read:
                return f"read by code beside the forward of {inner}"
        return None

    def _is_whole(self, module: nn.Module) -> bool:
        """Return whether a possible unit stays whole."""
        num_own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        child_names = {_name(name) for name, _ in module.named_children()}
        return (
            _size(module) <= self._largest
            or 2 * num_own >= _size(module)
            or _is_closed(module)
            or not child_names.isdisjoint(self._reads[type(module)])
        )


def _is_closed(module: nn.Module) -> bool:
    """Return whether modules inside, if any, may not be called."""
    is_torch = type(module).__module__.startswith("torch.nn.")
    return not any(map(_has_parameters, module.children())) or (
        is_torch and _has_forward(module) and not isinstance(module, _CALLS_CHILDREN)
    )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _name(path: str) -> str:
    last_name = path.rpartition(".")[2]
    return BY_INDEX if last_name.isdecimal() else last_name
