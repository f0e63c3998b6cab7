"""Find the preludes of a pipelined module: modules outside of the units that the first stage alone
can hold, such as a vision tower and the tower's projector.

A run with example inputs decides. A module that the run calls is a prelude if every call comes
before the first stage ends and hands on nothing but its output. A module that the run does not
reach (a tower, if the example is text) is a prelude if the module is registered before the units
and its parents only ever call it. The first step checks where such a module is called.

Any other module outside of the units stays on every stage, for a reason that a description of the
layout names.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isfunction, unwrap
from types import CodeType

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.pipeline.schedules.partition import (
    STAGE_END,
    Unit,
    unit_names,
    unit_weights,
)
from megatron_lightning.pipeline.stages.dependencies import EPILOGUE, Uses
from megatron_lightning.pipeline.stages.preludes import position_of
from megatron_lightning.pipeline.stages.units import Calls, Operations

_SMALLEST_COST = 0.1  # share of a block, below which a prelude does not move the boundaries
_FORWARD_SHARE = 1 / 3  # of a training step's operations: a frozen module has no backward
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.")
_NOT_IN_FORWARD = (
    "_init", "__init__", "tie_", "resize_", "set_", "configure_", "get_input_embeddings",
    "get_output_embeddings", "get_encoder", "get_decoder",
)  # fmt: skip
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Outside:
    """Modules with parameters outside of the units.

    Args:
        module: The pipelined module.
        preludes: Paths of the modules that the first stage alone holds.
        replicated: Path of a module on every stage -> the reason.
    """

    module: nn.Module
    preludes: tuple[str, ...] = ()
    replicated: Mapping[str, str] = field(default_factory=dict)

    def without(self, obstacles: Mapping[str, str]) -> Outside:
        """Return the modules with some preludes on every stage instead."""
        remaining = tuple(path for path in self.preludes if path not in obstacles)
        return replace(self, preludes=remaining, replicated={**self.replicated, **obstacles})

    def handing_on(self, uses: Uses) -> dict[str, str]:
        """Return the preludes whose state, beside the output, reaches units of other stages."""
        return {
            self._path(source): "it hands on state by a list, an attribute or a hook"
            for source, reader in uses.side_channels
            if source < 0 and reader > 0
        }

    def late(self, uses: Uses, end: int) -> dict[str, str]:
        """Return the preludes called behind the first stage, and lookups whose outputs later stages
        read: a table is cheaper to hold than the output to send.

        Args:
            uses: Uses of the outputs, in a run with example inputs.
            end: Number of units of the first stage.
        """
        obstacles = {
            self._path(call): "it is called inside of a unit"
            if position == EPILOGUE
            else "it is called behind the first stage"
            for call, position in uses.positions
            if position > end
        }
        for source, reader in uses.outputs:
            path = self._path(source) if source < 0 else ""
            if path and end <= reader < EPILOGUE and _is_lookup(self.module.get_submodule(path)):
                obstacles[path] = "units of later stages read what it looks up"
        return obstacles

    def weighted(
        self, units: Sequence[Unit], operations: Callable[[], Operations | None]
    ) -> tuple[Unit, ...]:
        """Return the units, with the cost of the preludes added to the weight of the first unit.

        A prelude costs as much as units of as many parameters and, if known, of as many operations.

        Args:
            units: The units.
            operations: Returns the operations of the modules. None: unknown.
        """
        names, weights = unit_names(units), unit_weights(units)
        sizes = {name: _size(self.module.get_submodule(name)) for name in self.preludes}
        weighing = [name for name, weight in zip(names, weights, strict=True) if weight > 0]
        total = sum(_size(self.module.get_submodule(name)) for name in weighing)
        if not any(sizes.values()) or not total:
            return tuple(units)
        operation_counts = operations() or {}
        worked = sum(operation_counts.get(name, 0.0) for name in weighing)
        cost = 0.0
        for name, size in sizes.items():
            share = size / total
            if worked and operation_counts.get(name):
                share = (share + operation_counts[name] / worked) / 2
            is_frozen = not any(
                p.requires_grad for p in self.module.get_submodule(name).parameters()
            )
            cost += share * (_FORWARD_SHARE if is_frozen else 1.0)
        cost *= sum(weights)
        # An embedding or a small projection must not move layers to other stages.
        if cost < _SMALLEST_COST * sum(weights) / len(weighing):
            return tuple(units)
        weighed = zip(names, [weights[0] + cost, *weights[1:]], strict=True)
        return tuple(unit if unit == STAGE_END else next(weighed) for unit in units)

    def _path(self, call: int) -> str:
        return self.preludes[position_of(call, len(self.preludes))]


def find_outside(
    module: nn.Module, units: Sequence[str], calls: Calls | None, replicated: Sequence[str] = ()
) -> Outside:
    """Return the modules with parameters outside of the units, and possible preludes among them.

    Args:
        module: The pipelined module.
        units: Paths of the units, in call order.
        calls: Calls of a run with example inputs. None: unknown.
        replicated: Path patterns of modules that stay on every stage.

    Raises:
        ConfigError: If a pattern matches no module outside of the units.
    """
    modules = dict(module.named_modules())
    matched = _matched(modules, units, replicated)
    inside_units = {id(child) for unit in units for child in module.get_submodule(unit).modules()}
    order = {path: position for position, path in enumerate(modules)}
    first = min(order.get(unit, 0) for unit in units)
    preludes: list[str] = []
    reasons: dict[str, str] = {}
    for path in _outside(modules, "", units, calls):
        holder = modules[path]
        if any(f"{path}.".startswith(f"{name}.") for name in matched):
            reasons[path] = "replicated_modules names it"
        elif any(f"{name}.".startswith(f"{path}.") for name in matched):
            reasons[path] = "replicated_modules names a module inside"
        elif any(id(child) in inside_units for child in holder.modules()):
            reasons[path] = "a unit holds it, too"
        elif calls is None:
            reasons[path] = "no example inputs show where it is called"
        # Called in the example run, outside of units: its place in the order of calls is known, so
        # one stage can run it.
        elif calls.get(path):
            preludes.append(path)
        # Not called: an unused head, or a branch that the example does not take. Only modules
        # registered before the units can be taken for inputs.
        elif order[path] > first:
            reasons[path] = "the example inputs do not reach it, and it is registered behind units"
        elif user := _other_use(modules, path):
            reasons[path] = f"the example inputs do not reach it, and {user} does not call it"
        else:
            preludes.append(path)
    return Outside(module, tuple(preludes), reasons)


def _matched(
    modules: Mapping[str, nn.Module], units: Sequence[str], patterns: Sequence[str]
) -> list[str]:
    paths = []
    for pattern in patterns:
        rules = compile_pattern(pattern), compile_pattern(f"**.{pattern}")
        matches = next(
            (m for rule in rules if (m := [p for p in modules if rule.fullmatch(p)])), []
        )
        paths_outside = [
            p for p in matches if not f"{p}.".startswith(tuple(f"{u}." for u in units))
        ]
        if not paths_outside:
            raise ConfigError(
                f"{pattern!r} in replicated_modules of pipeline_options matches no module outside "
                f"of the units {units[0]!r}, …, {units[-1]!r}. Give paths in the pipelined module "
                "as named_modules() does; * matches one segment."
            )
        paths += paths_outside
    return paths


def _outside(
    modules: Mapping[str, nn.Module], path: str, units: Sequence[str], calls: Calls | None
) -> Iterator[str]:
    """Yield the outermost modules with parameters outside of the units that are called, or may be
    called.
    """
    prefix = f"{path}." if path else ""
    for name, _ in modules[path].named_children():
        inner = f"{prefix}{name}"
        child = modules.get(inner)
        if child is None or inner in units or not any(True for _ in child.parameters()):
            continue
        if _is_divided(inner, child, units, calls):
            yield from _outside(modules, inner, units, calls)
        else:
            yield inner


def _is_divided(path: str, module: nn.Module, units: Sequence[str], calls: Calls | None) -> bool:
    """Return whether modules inside are called, and not the module itself."""
    if any(unit.startswith(f"{path}.") for unit in units) or isinstance(module, _LISTS):
        return True
    if type(module).forward is nn.Module.forward:
        return True
    calls_inside = [name for name in calls or () if name.startswith(f"{path}.")]
    return calls is not None and path not in calls and bool(calls_inside)


def _is_lookup(module: nn.Module) -> bool:
    """Return whether a module computes nothing, so that every stage better holds the module than
    receives the output.
    """
    owners = [child for child in module.modules() if child._parameters]
    return all(isinstance(child, nn.Embedding) for child in owners)


def _size(module: nn.Module) -> int:
    """Return the number of parameter elements, without lookup tables."""
    return sum(
        parameter.numel()
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
    )


# --------------------------------------------------------------------------------- uses in the code


def _other_use(modules: Mapping[str, nn.Module], path: str) -> str | None:
    """Return the class of a module around ``path`` that calls a method of the module, or a module
    inside, instead of the module itself. None: no such class.
    """
    segments = path.split(".")
    paths_around = [".".join(segments[:end]) for end in range(len(segments))]
    for owner in {type(modules[name]) for name in paths_around}:
        for kind in owner.__mro__:
            if f"{kind.__module__}.".startswith(_LIBRARIES):
                continue
            for name, function in vars(kind).items():
                if not isfunction(function) or name.startswith(_NOT_IN_FORWARD):
                    continue
                if segments[-1] in _called_inside(unwrap(function).__code__):
                    return owner.__name__
    return None


def _called_inside(code: CodeType) -> set[str]:
    """Return the attributes x of calls ``….x.y(…)`` in a function, where y is no method of every
    module.
    """
    paths: set[str] = set()
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = []
            continue
        chain.append(str(instruction.argval))
        if _is_method(instruction) and not hasattr(nn.Module, chain[-1]):
            paths.update(chain[:-1])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            paths |= _called_inside(constant)
    return paths


def _is_method(instruction: dis.Instruction) -> bool:
    """Return whether the next value on the stack is called."""
    # From Python 3.12 on, the lowest bit of LOAD_ATTR stands for LOAD_METHOD.
    return instruction.opname == "LOAD_METHOD" or "NULL|self" in instruction.argrepr
