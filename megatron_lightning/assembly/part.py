"""Description of a rank's part of a module: specs and global names of the parameters, and the
stages using each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from megatron_lightning.assembly.plans import Plans
from megatron_lightning.optim.fsdp.fully_sharded import ShardedUnits
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.ties import tied_names
from megatron_lightning.pipeline.stages.stage import StagePartition


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of a module."""

    specs: dict[str, ShardSpec]
    """Name of a parameter in the module -> spec."""
    tied: dict[str, str]
    """Name of a tied copy -> name of the owner."""
    names: tuple[str, ...]
    """Keys of the full module's state dict, in order."""
    num_parameters: int
    """Elements of the full module's parameters."""
    path: str | None = None
    """Path of the module partitioned into stages. None with a single stage."""
    partition: StagePartition | None = None
    """Stages of the partitioned module on this rank. None with a single stage."""
    stage_of_unit: dict[str, int] = field(default_factory=dict)
    """Path of a pipeline unit, or of a prelude, on this rank -> stage. Names outside are on every
    pipeline rank."""
    preludes: frozenset[str] = frozenset()
    """Paths of the preludes, on any rank."""
    replicated_over_pp: frozenset[str] = frozenset()
    """Names of unit parameters on every pipeline rank."""
    stage_of: dict[str, int] = field(default_factory=dict)
    """Name of a parameter -> the only stage of this rank using the parameter. Parameters used by
    several stages are absent."""
    shards_sequence: bool = False
    """Whether activations are sequence shards between tensor-parallel regions, in any of the
    module's models."""
    plans: Plans = field(default_factory=Plans)
    """Sharding plans used to divide the module. Empty after pickling."""
    units: ShardedUnits | None = None
    """Units sharded by FSDP2. None without FSDP2, and before sharding."""

    @property
    def units_of_stage(self) -> dict[int, list[str]]:
        """Stages of this rank -> paths of the stages' units, without preludes. Empty with a single
        stage.
        """
        stages = sorted(set(self.stage_of_unit.values()))
        own_units = [item for item in self.stage_of_unit.items() if item[0] not in self.preludes]
        return {number: [unit for unit, stage in own_units if stage == number] for number in stages}

    def in_unit(self, name: str) -> bool:
        """Return whether a parameter or buffer belongs to a pipeline unit or prelude, so that only
        this pipeline rank holds the tensor.
        """
        return (
            name not in self.replicated_over_pp and _stage_of(name, self.stage_of_unit) is not None
        )

    def describes(self, module: nn.Module) -> bool:
        """Return whether the module still has the described parameters. Hooks may have added or
        rebuilt layers.
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
    """Describe a module reduced to this rank's part. The arguments are fields of :class:`Part`."""
    specs, stage_of_unit = named_shard_specs(module), {}
    replicated_over_pp = preludes = frozenset[str]()
    if partition is not None:
        prefix = f"{path}." if path else ""
        stage_of_unit = {
            prefix + name: stage for stage in partition.own for name in partition.modules_of(stage)
        }
        preludes = frozenset(prefix + name for name in partition.preludes)
        replicated_over_pp = frozenset(prefix + name for name in partition.replicated_over_pp)
        # Each of these ranks holds a copy with a gradient of its own calls: the sum over pp is the
        # gradient.
        specs = {
            name: replace(spec, partial_over=(*spec.partial_over, "pp"))
            if name in replicated_over_pp or _stage_of(name, stage_of_unit) is None
            else spec
            for name, spec in specs.items()
        }  # gradients of parameters on every rank arise on a single stage or on several
    return Part(
        specs=specs,
        tied=tied_names(module),
        names=names,
        num_parameters=num_parameters,
        path=path,
        partition=partition,
        stage_of_unit=stage_of_unit,
        preludes=preludes,
        replicated_over_pp=replicated_over_pp,
        stage_of=dict.fromkeys(specs, 0)
        if partition is None
        else _stages_of_parameters(module, stage_of_unit, replicated_over_pp),
    )


def _stage_of(name: str, stage_of_unit: Mapping[str, int]) -> int | None:
    """Return the stage of a parameter's or buffer's unit. None: outside of the units."""
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
    """Return the stage of every parameter used by a single stage."""
    users: dict[int, set[int | None]] = {}
    # A tied parameter has a name on each of the parameter's stages.
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
