"""Find the module to divide by a pipeline, and the module's units.

*Units* are submodules that a forward of the pipelined module calls exactly once each, in order,
each fed by the unit before: embedding, blocks, norm, head. Units are, in this order of preference,

1. named from outside (``PipelineOptions.units``);
2. listed by the module itself (``pipeline_units()``);
3. listed in the ``_pp_plan`` of a ``transformers`` model, if the plan holds a list of layers;
4. found: the list of modules with the most parameters, called once each and in order, and all
   modules beside the list or beside the list's parents, with parameters, and called once.

A module beside the list that mostly is another list of such blocks, as an encoder, is opened: its
blocks are units, too, and blocks of all lists are partitioned together.

Calls are known from a run with example inputs (``analysis``). Without example inputs, modules count
as called in the order of registration, and the first step checks the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.pipeline.schedules.partition import Unit, is_layer, unit_names

_LISTS = (nn.ModuleList, nn.ModuleDict)
_LIBRARIES = ("lightning", "pytorch_lightning", "torch")

Calls = Mapping[str, int]
"""Path of a module -> number of calls in a forward, in the order of the first calls."""
Operations = Mapping[str, float]
"""Path of a module -> operations of a forward."""

_EQUAL = 2.0
"""Blocks whose costs differ by no more than this factor are partitioned by count."""


class Pipelined(NamedTuple):
    """The module to divide by a pipeline."""

    path: str
    module: nn.Module
    units: tuple[Unit, ...]
    """Paths in the module, with weights if the weights differ from the weights of a plain list."""


def find_pipelined(
    root: nn.Module,
    patterns: Sequence[str] = (),
    calls_of: Callable[[str], Calls | None] = lambda _: None,
    operations_of: Callable[[str], Operations | None] = lambda _: None,
) -> Pipelined:
    """Return the pipelined module of ``root`` and the module's units.

    Args:
        root: The full LightningModule, or any module.
        patterns: Path patterns of the units, in call order. Empty: the units are found.
        calls_of: Returns the calls in a forward of the module at a path, by the paths in the
            module. None: unknown.
        operations_of: Returns the operations of the modules in the same way. Asked only if the
            blocks have unequal numbers of parameters.

    Raises:
        ConfigError: If there are no units, or the units contradict each other.
    """
    # In the order of authority: the user, the model, the plan of a known model, the search.
    if patterns:
        return _named(root, patterns)
    declared = [
        (path, module)
        for path, module in root.named_modules()
        if callable(getattr(module, "pipeline_units", None))
    ]
    # A module around others that declare units speaks for these.
    declared = [
        (path, module)
        for path, module in declared
        if not any(
            path != other_path and f"{path}.".startswith(_prefix(other_path))
            for other_path, _ in declared
        )
    ]
    if len(declared) > 1:
        raise ConfigError(
            "a pipeline divides one module, and "
            f"{' and '.join(repr(path) for path, _ in declared)} of {type(root).__name__} have "
            "pipeline_units(). Keep one of the methods, or name the units in "
            "PipelineOptions(units=[...])."
        )
    if declared:
        path, module = declared[0]
        return Pipelined(path, module, _modules_only(module, module.pipeline_units()))
    return _planned(root, calls_of, operations_of) or _found(root, calls_of, operations_of)


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module, such as a LightningModule, defines a forward of its own."""
    return type(module).forward.__module__.partition(".")[0] not in _LIBRARIES


def _modules_only(module: nn.Module, units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Leave out parameters and buffers, since every stage keeps parameters and buffers outside of
    units.

    Raises:
        ConfigError: If no module is left.
    """
    tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    modules = tuple(unit for unit in units if tensors.isdisjoint(unit_names([unit])))
    if not unit_names(modules):
        raise ConfigError(
            f"pipeline_units() of {type(module).__name__} names no module, and a pipeline divides "
            "modules: parameters and buffers are on every stage. Name the children that forward "
            "calls in order, or remove the method, so that units are found."
        )
    return modules


def _named(root: nn.Module, patterns: Sequence[str]) -> Pipelined:
    """Return the modules matched by the patterns, in the order of the patterns."""
    paths = [path for path, _ in root.named_modules() if path]
    found: list[str] = []
    for pattern in patterns:
        matches = [path for path in paths if compile_pattern(pattern).fullmatch(path)]
        matches = matches or [p for p in paths if compile_pattern(f"**.{pattern}").fullmatch(p)]
        if not matches:
            raise ConfigError(
                f"{pattern!r} in units of pipeline_options matches no module of "
                f"{type(root).__name__}. Give paths as named_modules() does; * matches one segment."
            )
        found += [path for path in matches if path not in found]
    path = _calling(root, _common(found))
    prefix = f"{path}." if path else ""
    return Pipelined(
        path, root.get_submodule(path), tuple(name.removeprefix(prefix) for name in found)
    )


def _common(paths: Sequence[str]) -> str:
    """Return the path of the innermost module around all ``paths``."""
    parents = [path.split(".")[:-1] for path in paths]
    common = []
    for segments in zip(*parents, strict=False):
        if len(set(segments)) > 1:
            break
        common.append(segments[0])
    return ".".join(common)


def _calling(root: nn.Module, path: str) -> str:
    """Return ``path``, or the path of the next module above with a call that runs a forward."""
    while path and isinstance(root.get_submodule(path), _LISTS):
        path = path.rpartition(".")[0]
    return path


# ----------------------------------------------------------------------------------- planned, found


def _planned(
    root: nn.Module,
    calls_of: Callable[[str], Calls | None],
    operations_of: Callable[[str], Operations | None],
) -> Pipelined | None:
    """Return the units of a transformers model's ``_pp_plan``. None if the plan has no list of
    layers.
    """
    planned = ((path, module, getattr(module, "_pp_plan", None)) for path, module in _all(root))
    path, module, plan = next(
        (candidate for candidate in planned if candidate[2]), ("", root, None)
    )
    if not plan:
        return None
    calls = calls_of(path)
    modules = dict(_all(module))
    if not all(name in modules for name in plan):  # copied from another family
        return None
    units = [unit for name in plan for unit in _expanded(modules, name, calls)]
    body = max((_body(modules, name, calls) for name in plan), key=len)
    if len(body) < 2 or any(calls is not None and calls.get(unit) != 1 for unit in units):
        return None
    ordered = _ordered(modules, units, calls)
    ordered += _behind(modules, ordered, calls)
    weighed = _weighed(modules, ordered, body, (), partial(operations_of, path))
    return Pipelined(path, module, weighed)


def _behind(
    modules: Mapping[str, nn.Module], units: Sequence[str], calls: Calls | None
) -> list[str]:
    """Return modules with parameters that a forward calls once, behind the last unit, such as an
    output layer that a plan does not name.
    """
    names = list(calls or ())
    paths: list[str] = []
    for name in names[names.index(units[-1]) + 1 :] if names else ():
        is_inside = any(name.startswith(f"{other_unit}.") for other_unit in (*units, *paths))
        is_around = any(unit.startswith(f"{name}.") for unit in units)
        is_called_once = calls is not None and calls[name] == 1
        if is_called_once and not is_inside and not is_around and _num_parameters(modules, [name]):
            paths.append(name)
    return paths


def _found(
    root: nn.Module,
    calls_of: Callable[[str], Calls | None],
    operations_of: Callable[[str], Operations | None],
) -> Pipelined:
    lists = [
        path
        for path, module in root.named_modules()
        if isinstance(module, (*_LISTS, nn.Sequential)) and len(module) > 1
    ]
    path = _calling(root, _partitioned_module(root, _largest(root, lists)))
    module, calls = root.get_submodule(path), calls_of(path)
    modules = dict(_all(module))
    bodies = [
        _body(modules, inner, calls)
        for inner, child in modules.items()
        if isinstance(child, (*_LISTS, nn.Sequential))
    ]
    repeated = [names for names in bodies if len({type(modules[name]) for name in names}) == 1]
    # If calls are unknown, a dict of different modules may be run in any order.
    bodies = repeated if calls is None and any(len(names) > 1 for names in repeated) else bodies
    body = max(bodies, key=lambda names: _num_parameters(modules, names), default=())
    if len(body) < 2:
        raise ConfigError(
            f"{type(root).__name__} has no list of modules that one forward calls once each, in "
            "order, so a pipeline cannot divide it. Name the units, in the order in which they "
            "are called, in PipelineOptions(units=[...]), or set pipeline_model_parallel_size "
            "to 1."
        )
    units, parent, other_blocks = list(body), body[0], list[str]()
    while parent:  # modules beside the body, and beside the body's parents
        # Towards the root, so that embeddings and heads beside the body become units of their own.
        parent = parent.rpartition(".")[0]
        for name in _children(modules, parent):
            if not any(unit == name or unit.startswith(f"{name}.") for unit in units):
                blocks = _stack(modules, name, calls)
                other_blocks += blocks
                opened = _beside(modules, blocks, calls, name) if blocks else [name]
                units += [
                    unit
                    for inner in opened
                    for unit in _expanded(modules, inner, calls)
                    if _num_parameters(modules, [unit])
                ]
    units = [unit for unit in units if calls is None or calls.get(unit) == 1]
    ordered = _ordered(modules, units, calls)
    weighed = _weighed(modules, ordered, body, other_blocks, partial(operations_of, path))
    return Pipelined(path, module, weighed)


def _stack(modules: Mapping[str, nn.Module], path: str, calls: Calls | None) -> tuple[str, ...]:
    """Return the blocks of a module that is called itself, and mostly is a list of equal blocks."""
    if calls is None or calls.get(path) != 1 or isinstance(modules[path], (*_LISTS, nn.Sequential)):
        return ()
    lists = [name for name in modules if name.startswith(f"{path}.")]
    bodies = (_body(modules, name, calls) for name in lists)
    uniform = [names for names in bodies if len(names) > 1 and len(_classes(modules, names)) == 1]
    blocks = max(uniform, key=lambda names: _num_parameters(modules, names), default=())
    embeddings = [
        name for name in lists if isinstance(modules[name], nn.Embedding)
    ]  # large in small models, and never where the work is
    total = _num_parameters(modules, [path]) - _num_parameters(modules, embeddings)
    return blocks if 2 * _num_parameters(modules, blocks) > total else ()


def _beside(
    modules: Mapping[str, nn.Module], blocks: Sequence[str], calls: Calls | None, top: str
) -> list[str]:
    """Return blocks, and modules beside the blocks or the blocks' parents, inside of ``top``."""
    units, parent = list(blocks), blocks[0]
    while parent != top:
        parent = parent.rpartition(".")[0]
        for name in _children(modules, parent):
            if not any(unit == name or unit.startswith(f"{name}.") for unit in units):
                units.append(name)
    return units


def _classes(modules: Mapping[str, nn.Module], names: Iterable[str]) -> set[type[nn.Module]]:
    return {type(modules[name]) for name in names}


def _all(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules by all paths, since some modules have several paths."""
    return list(module.named_modules(remove_duplicate=False))


def _largest(root: nn.Module, lists: Sequence[str]) -> str:
    modules = dict(root.named_modules())
    return max(lists, key=lambda path: _num_parameters(modules, [path]), default="")


def _partitioned_module(root: nn.Module, path: str) -> str:
    """Return the path of the partitioned module: the full model around the list at ``path``."""
    top = path.partition(".")[0]
    owners = {
        name for name, child in root.named_children() if any(True for _ in child.parameters())
    }
    if has_own_forward(root) and (owners - {top} or root._parameters):
        return ""
    return top


def _body(modules: Mapping[str, nn.Module], path: str, calls: Calls | None) -> tuple[str, ...]:
    """Return the children of a list with parameters and a single call each, in order."""
    if not isinstance(modules[path], (*_LISTS, nn.Sequential)):
        return ()
    names = [name for name in _children(modules, path) if _num_parameters(modules, [name])]
    if calls is None:
        return tuple(names)
    names = [name for name in names if calls.get(name) == 1]
    return tuple(names) if names == _ordered(modules, names, calls) else ()


def _children(modules: Mapping[str, nn.Module], path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name, _ in modules[path].named_children()]


def _expanded(modules: Mapping[str, nn.Module], name: str, calls: Calls | None) -> list[str]:
    """Return the module, or the children of a list that is not called itself."""
    is_called = not isinstance(modules[name], _LISTS) if calls is None else name in calls
    if is_called:
        return [name]
    return [unit for child in _children(modules, name) for unit in _expanded(modules, child, calls)]


def _ordered(
    modules: Mapping[str, nn.Module], names: Sequence[str], calls: Calls | None
) -> list[str]:
    """Return the names in the order of the calls, or else of registration."""
    order = {name: index for index, name in enumerate(modules if calls is None else calls)}
    return sorted(dict.fromkeys(names), key=lambda name: order[name])


def _num_parameters(modules: Mapping[str, nn.Module], names: Iterable[str]) -> int:
    """Return the number of elements of the parameters, and of running statistics, since only one
    stage may update running statistics.
    """
    children = [child for name in names for child in modules[name].modules()]
    statistics = [c for c in children if isinstance(c, nn.modules.batchnorm._NormBase)]
    tensors: list[Tensor] = [p for c in children for p in c.parameters(recurse=False)]
    tensors += [buffer for child in statistics for buffer in child.buffers(recurse=False)]
    return sum(tensor.numel() for tensor in tensors)


def _weighed(
    modules: Mapping[str, nn.Module],
    units: Sequence[str],
    body: Sequence[str],
    others: Sequence[str],
    operations: Callable[[], Operations | None],
) -> tuple[Unit, ...]:
    """Return the units with shares of the time. Blocks of lists weigh 1 and other units nothing. If
    blocks differ by more than a factor of 2, blocks weigh their cost: the mean of their shares in
    parameters and in operations. If the blocks of the body have several classes, every unit weighs
    as much as its parameters.

    Args:
        modules: Modules by path.
        units: Paths of the units.
        body: Blocks of the largest list.
        others: Blocks of other lists.
        operations: Returns the operations of the modules. None: unknown.
    """
    kinds = _classes(modules, body)
    # Blocks of several classes (a hybrid) have no common unit but their parameters.
    if len(kinds) > 1:
        return tuple((name, float(_num_parameters(modules, [name]))) for name in units)
    weighing = {name for name in units if is_layer(name) and type(modules[name]) in kinds}
    weighing |= {name for name in units if name in body or name in others}
    sizes = {name: float(_num_parameters(modules, [name])) for name in weighing}
    if max(sizes.values()) <= _EQUAL * min(sizes.values()):
        return tuple((name, float(name in weighing)) for name in units)
    # Operations are counted only here, since counting runs the model on fake tensors.
    operation_counts = operations() or {}
    costs = _shares(sizes)
    if any(operation_counts.get(name) for name in weighing):
        worked = _shares({name: operation_counts.get(name, 0.0) for name in weighing})
        costs = {name: (costs[name] + worked[name]) / 2 for name in weighing}
    return tuple((name, costs.get(name, 0.0)) for name in units)


def _shares(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return sizes in units of their mean."""
    mean = sum(sizes.values()) / len(sizes)
    return {name: size / mean for name, size in sizes.items()}
