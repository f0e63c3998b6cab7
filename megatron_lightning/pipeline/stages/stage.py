"""Reduce a plain module to the units of a pipeline rank, in place.

The units of other ranks stay in place and lose their tensors (``parallel.absent``). Every module
thereby keeps path and index, and checkpoints, optimizers and summaries see an ordinary module.
The same is true of preludes (``preludes``), modules of the first stage outside of the units. Other
parameters outside of the units stay on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.other_stages import is_absent, make_absent
from megatron_lightning.pipeline.stages.preludes import name_of


class StagePartition:
    """The stages of a pipelined module on this rank.

    Creating a partition makes the units of other ranks absent.

    Args:
        module: The pipelined module.
        stages: Unit paths of every stage of the pipeline, in stage order.
        own: Stages of this rank.
        replicated_over_pp: Unit parameters replicated over pp, since several stages use the
            parameters.
        preludes: Paths of modules outside of the units that the first stage holds and runs.
        has_all_units: Whether ``module`` has all units. False: ``module`` was reduced to the
            ``own`` stages before.

    Raises:
        ConfigError: If a unit does not exist or contains another.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[str]],
        own: Sequence[int],
        replicated_over_pp: Collection[str] = (),
        preludes: Sequence[str] = (),
        *,
        has_all_units: bool = True,
    ) -> None:
        self.module = module
        self.stages = tuple(map(tuple, stages))
        self.own = tuple(own)
        self.replicated_over_pp = frozenset(replicated_over_pp)
        self.preludes = tuple(preludes)
        self.units = tuple(unit for stage in self.stages for unit in stage)
        """The units of all stages, in call order. A unit's position is the unit's index."""
        ends = [*accumulate(len(stage) for stage in self.stages)]
        self.bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        """Index of the first unit of every stage, and of the first unit behind the stage."""
        if not has_all_units:
            return
        check_units(module, self.units)
        # Shared parameters survive in the units of other stages: compared by identity, since a tied
        # parameter has several names.
        kept_ids = {id(module.get_parameter(name)) for name in self.replicated_over_pp}
        own_modules = {name for stage in self.own for name in self.modules_of(stage)}
        for name in self.modules:
            if name not in own_modules:
                make_absent(module.get_submodule(name), name, kept_ids)

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules held by a single stage: preludes and units."""
        return (*self.preludes, *self.units)

    def modules_of(self, stage: int) -> tuple[str, ...]:
        """Return the modules held by ``stage``."""
        return (*(self.preludes if stage == 0 else ()), *self.stages[stage])

    def is_last(self, stage: int) -> bool:
        """Return whether ``stage`` is the last stage."""
        return stage == len(self.stages) - 1

    def name_of(self, index: int) -> str:
        """Return the path of the unit with an index, or of the prelude of a call."""
        return name_of(index, self.units, self.preludes)


def check_units(module: nn.Module, units: Sequence[str]) -> None:
    """Check that ``units``, of all stages together, are submodules, none inside another, and that
    no module around the units is compiled.

    Raises:
        ConfigError: If a unit fails a check.
    """
    paths = dict(module.named_modules(remove_duplicate=False))
    first: dict[nn.Module, str] = {}
    for unit in units:
        if unit not in paths:
            raise ConfigError(
                f"{unit!r} is listed as a pipeline unit, and {type(module).__name__} has no such "
                "submodule. List paths as named_modules() gives them."
            )
        if first.setdefault(paths[unit], unit) != unit:
            raise ConfigError(
                f"units {first[paths[unit]]!r} and {unit!r} are one module, which runs twice; a "
                "unit runs on one stage. Give each layer a module of its own (they may share "
                "parameters), or name other units in PipelineOptions(units=[...])."
            )
        parts = unit.split(".")
        # A compiled graph around a unit cannot be left by an exception, nor can a call inside be
        # replaced.
        paths_around = [".".join(parts[:end]) for end in range(len(parts))]
        compiled = [path for path in paths_around if _is_compiled(paths[path])]
        if compiled:
            raise ConfigError(
                f"{compiled[0] or type(module).__name__} is compiled as one, and a pipeline leaves "
                f"its forward at {unit!r}. Compile each unit: call unit.compile()."
            )
        outer = next(
            (other_unit for other_unit in units if unit.startswith(f"{other_unit}.")), None
        )
        if outer is not None:
            raise ConfigError(
                f"pipeline unit {outer!r} contains unit {unit!r}; a unit runs on one stage. List "
                "one of them."
            )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def has_unit(module: nn.Module, unit: str) -> bool:
    """Return whether this rank has ``unit`` of a pipelined module."""
    return not is_absent(module.get_submodule(unit))
