"""Reduce a plain module to the units of one pipeline rank, keeping every global name.

The module that is pipelined states its units in ``pipeline_units()``, paths in the order of its
forward, and its forward tolerates absent ones: a child of a ``ModuleList`` or ``ModuleDict`` (or
``Sequential``) is gone, any other attribute is None. What is left keeps its name, so that
checkpoints, optimizers and summaries see one ordinary module. A ``ModuleList`` keeps the integer
names of its remaining children, and indices count all of them (see ``containers``): a forward
iterates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.containers import keep_positions
from megatron_lightning.pipeline.partition import Unit, unit_names

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_pipelined_module(root: nn.Module) -> tuple[str, nn.Module]:
    """Return (path, module) of the one submodule of ``root``, itself included, that has
    ``pipeline_units()``.

    Raises:
        ConfigError: If there is none, or more than one.
    """
    found = [
        (path, module)
        for path, module in root.named_modules()
        if callable(getattr(module, "pipeline_units", None))
    ]
    if len(found) != 1:
        listed = ", ".join(repr(path or type(module).__name__) for path, module in found) or "none"
        raise ConfigError(
            "a pipeline splits exactly one submodule, the one with pipeline_units(), and "
            f"{type(root).__name__} has {len(found)} ({listed}). Give the model that the step "
            "calls a method pipeline_units() that returns the ordered paths of its units, or set "
            "pipeline_model_parallel_size to 1."
        )
    return found[0]


def pipeline_units(module: nn.Module) -> Sequence[Unit]:
    """Return the units that ``module.pipeline_units()`` lists."""
    list_units: Callable[[], Sequence[Unit]] = getattr(module, "pipeline_units")  # noqa: B009 (no attribute of nn.Module)
    return list_units()


class StagePartition:
    """The stages of one pipelined module that live on this rank.

    Creating it drops the units of other ranks from ``module`` in place. Nothing is stored on the
    module, which stays as copyable and picklable as it was.

    Args:
        module: A module with ``pipeline_units()``.
        stages: Unit paths of every stage of the pipeline, in stage order.
        own: Stages of this rank.
        has_all_units: Whether ``module`` has all its units; False: it was reduced to the ``own``
            stages before.

    Raises:
        ConfigError: If a unit does not exist or contains another, or a parameter belongs to no
            unit.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[str]],
        own: Sequence[int],
        *,
        has_all_units: bool = True,
    ) -> None:
        self.module = module
        self.stages = tuple(map(tuple, stages))
        self.own = tuple(own)
        if not has_all_units:
            return
        units = [unit for stage in self.stages for unit in stage]
        check_units(module, units)
        kept = {unit for stage in self.own for unit in self.stages[stage]}
        for unit in units:
            if unit not in kept:
                _drop(module, unit)

    def view(self, stage: int) -> nn.Module:
        """Return ``module`` as one stage sees it.

        With one stage on this rank that is the module itself. Otherwise it is a shallow copy
        without the other stages' units: parameters, hooks and submodules are shared. It is made
        again by every call, so that it always agrees with the module; what a forward assigns to
        ``self`` is lost with it.
        """
        if len(self.own) == 1:
            return self.module
        foreign = [unit for other in self.own if other != stage for unit in self.stages[other]]
        return _view(self.module, foreign)


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


def check_units(module: nn.Module, units: Sequence[str]) -> None:
    """Check that ``units``, of all stages together, are the pipelined module's own and hold its
    parameters.

    Raises:
        ConfigError: If a unit does not exist or contains another, or a parameter belongs to no
            unit.
    """
    listed = unit_names(pipeline_units(module)) if hasattr(module, "pipeline_units") else units
    if set(listed) != set(units):
        odd = sorted(set(listed) ^ set(units))
        raise ConfigError(
            f"the stages and pipeline_units() differ in {', '.join(odd)}. Put every unit on one "
            "stage."
        )
    for unit in units:
        try:
            owner, name = _owner(module, unit)
        except AttributeError as error:
            raise ConfigError(_no_unit(module, unit)) from error
        if (
            name not in owner._modules
            and name not in owner._parameters
            and name not in owner._buffers
        ):
            raise ConfigError(_no_unit(module, unit))
        outer = next((other for other in units if unit.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"pipeline unit {outer!r} contains unit {unit!r}; a unit runs on one stage. List "
                "one of them."
            )
    members = set(units)
    for path, _ in module.named_parameters(remove_duplicate=False):
        parts = path.split(".")
        if not any(".".join(parts[:end]) in members for end in range(1, len(parts) + 1)):
            raise ConfigError(
                f"parameter {path!r} of {type(module).__name__} belongs to no pipeline unit, so "
                "every stage would train a copy of its own. List it, or a module that holds it, "
                "in pipeline_units()."
            )


def has_unit(module: nn.Module, unit: str) -> bool:
    """Return whether ``unit`` of a pipelined module is there, and has not been dropped."""
    try:
        owner, name = _owner(module, unit)
    except AttributeError:  # what holds it is absent
        return False
    return any(
        members.get(name) is not None
        for members in (owner._modules, owner._parameters, owner._buffers)
    )


def _no_unit(module: nn.Module, unit: str) -> str:
    return (
        f"pipeline_units() lists {unit!r}, and {type(module).__name__} has no such submodule, "
        "parameter or buffer. List paths as named_modules() gives them."
    )


def _drop(module: nn.Module, unit: str) -> None:
    owner, name = _owner(module, unit)
    for members in (owner._modules, owner._parameters, owner._buffers):
        if name in members:
            if isinstance(owner, _CONTAINERS):
                keep_positions(owner)
                del members[name]
            else:
                members[name] = None


def _view(module: nn.Module, foreign: Sequence[str]) -> nn.Module:
    """Return a shallow copy of ``module``, and of those on the way to a foreign unit, without the
    foreign units.
    """
    view = module.__class__.__new__(module.__class__)
    view.__dict__.update(module.__dict__)
    # It would run the full module; units inside stay compiled.
    view.__dict__.pop("_compiled_call_impl", None)
    for registry in ("_modules", "_parameters", "_buffers"):
        view.__dict__[registry] = dict(module.__dict__[registry])
    inside: dict[str, list[str]] = {}
    for unit in foreign:
        name, _, rest = unit.partition(".")
        if rest:
            inside.setdefault(name, []).append(rest)
        else:
            _drop(view, name)
    for name, units in inside.items():
        child = module._modules[name]
        if child is not None:
            view._modules[name] = _view(child, units)
    return view
