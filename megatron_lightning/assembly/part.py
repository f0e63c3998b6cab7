"""Description of a rank's part of a module: specs and global names of its parameters, and the
stages that use them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from megatron_lightning.assembly.plans import Plans
from megatron_lightning.optim.fsdp.fully_sharded import ShardedUnits
from megatron_lightning.parallel.sharding import named_shard_specs, tied_names
from megatron_lightning.parallel.spec import ShardSpec
from megatron_lightning.pipeline.stages.stage import StagePartition


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of a module."""

    specs: dict[str, ShardSpec]
    """Name of a parameter in the module -> its spec."""
    tied: dict[str, str]
    """Name of a tied copy -> name of its owner."""
    names: tuple[str, ...]
    """Keys of the full module's state dict, in order."""
    num_parameters: int
    """Elements of the full module's parameters."""
    path: str | None = None
    """Path of the module that is partitioned into stages; None with one stage."""
    partition: StagePartition | None = None
    """The stages of that module that live on this rank; None with one stage."""
    stage_of_unit: dict[str, int] = field(default_factory=dict)
    """Path of a pipeline unit on this rank -> its stage; names outside of the units are on every
    pipeline rank."""
    replicated_over_pp: frozenset[str] = frozenset()
    """Names of parameters in units that are on every pipeline rank all the same."""
    stage_of: dict[str, int] = field(default_factory=dict)
    """Name of a parameter -> the one stage of this rank that uses it; parameters that several may
    use are absent."""
    shards_sequence: bool = False
    """Whether activations are sequence shards between tensor-parallel regions, in some of the
    module's models."""
    plans: Plans = field(default_factory=Plans)
    """Sharding plans by which the module was divided; none in a module that was pickled."""
    units: ShardedUnits | None = None
    """Units that FSDP2 has sharded; None without it, and before."""

    @property
    def units_of_stage(self) -> dict[int, list[str]]:
        """Stages of this rank -> paths of their units; empty with one stage."""
        stages = sorted(set(self.stage_of_unit.values()))
        return {
            own: [unit for unit, stage in self.stage_of_unit.items() if stage == own]
            for own in stages
        }

    def in_unit(self, name: str) -> bool:
        """Return whether a parameter or buffer belongs to a pipeline unit, so that only this
        pipeline rank holds it.
        """
        return (
            name not in self.replicated_over_pp and _stage_of(name, self.stage_of_unit) is not None
        )

    def describes(self, module: nn.Module) -> bool:
        """Return whether the module still has these parameters; hooks may have added or rebuilt
        layers.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        return shapes == {name: spec.local_shape for name, spec in self.specs.items()}


def describe_part(
    module: nn.Module,
    names: tuple[str, ...],
    num_parameters: int,
    path: str | None,
    partition: StagePartition | None,
) -> Part:
    """Describe a module that has been reduced to this rank's part; the arguments are fields of
    :class:`Part`.
    """
    specs, stage_of_unit = named_shard_specs(module), {}
    replicated_over_pp: frozenset[str] = frozenset()
    if partition is not None:
        prefix = f"{path}." if path else ""
        stage_of_unit = {
            prefix + unit: stage for stage in partition.own for unit in partition.stages[stage]
        }
        replicated_over_pp = frozenset(prefix + name for name in partition.replicated_over_pp)
        specs = {
            name: replace(spec, partial_over=(*spec.partial_over, "pp"))
            if name in replicated_over_pp or _stage_of(name, stage_of_unit) is None
            else spec
            for name, spec in specs.items()
        }  # gradients of what is on every rank arise on one stage or on several
    return Part(
        specs=specs,
        tied=tied_names(module),
        names=names,
        num_parameters=num_parameters,
        path=path,
        partition=partition,
        stage_of_unit=stage_of_unit,
        replicated_over_pp=replicated_over_pp,
        stage_of=dict.fromkeys(specs, 0)
        if partition is None
        else _stages_of_parameters(module, stage_of_unit, replicated_over_pp),
    )


def _stage_of(name: str, stage_of_unit: Mapping[str, int]) -> int | None:
    """Return the stage of the unit that a parameter or buffer belongs to; None: it is outside of
    the units.
    """
    return next(
        (
            stage
            for unit, stage in stage_of_unit.items()
            if name == unit or name.startswith(f"{unit}.")
        ),
        None,
    )


def _stages_of_parameters(
    module: nn.Module, stage_of_unit: Mapping[str, int], replicated_over_pp: Collection[str]
) -> dict[str, int]:
    """Return the stage of every parameter that only one stage uses."""
    users: dict[int, set[int | None]] = {}
    # A tied one has a name on each of its stages.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(_stage_of(name, stage_of_unit))
    stages = {name: users[id(parameter)] for name, parameter in module.named_parameters()}
    return {
        name: stage
        for name, only in stages.items()
        if len(only) == 1 and name not in replicated_over_pp
        for stage in only
        if stage is not None
    }
