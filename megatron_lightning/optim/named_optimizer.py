"""The optimizer of a module by its class, as plain values of a configuration or a checkpoint.

    class_path: torch.optim.AdamW
    init_args: {betas: [0.9, 0.95]}

A chain names several optimizers. A parameter belongs to the first optimizer with a matching
pattern, and the last optimizer may leave out the patterns.

    class_path: megatron_lightning.optim.ChainedOptimizer
    init_args:
      optimizers:
      - class_path: megatron_lightning.optim.Muon
        params: ["**.layers.**"]
        init_args: {lr: 0.02}
      - class_path: torch.optim.AdamW

The values may come from somebody else's checkpoint. So a class is torch's, ours, or in a module
that is imported already. The command line imports the classes that a user has typed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import nn

from megatron_lightning.config.class_paths import imported_class
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.maximal_update import GroupScaling, Scaling, scale_eps
from megatron_lightning.optim.param_groups import ParamGroup, check_options, make_param_groups
from megatron_lightning.optim.stepping.chained import ChainedOptimizer
from megatron_lightning.parallel.shards.patterns import compile_pattern, nearest_pattern
from megatron_lightning.parallel.shards.ties import tied_names

PlainValue: TypeAlias = bool | int | float | str | list | dict | None  # type: ignore[type-arg]
"""A value of a configuration file. jsonargparse would read classes into values of other types."""
_OURS = ("ChainedOptimizer", "Muon")
_KEYS = ("class_path", "init_args", "params")
_IN_A_LAYER = re.compile(r"\.\d+\.")
_MATRIX_DIMS = (2, 3)  # a matrix, and a stack of experts' matrices


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer:
    """An optimizer by name.

    Args:
        class_path: The class, with its module, or the name of a class of ``torch.optim``.
        init_args: Arguments of the class.
        params: Patterns of the parameters' names, for a member of a chain. None: the matrices of
            numbered layers for Muon, and all parameters for other classes.
        members: The optimizers of a chain.
    """

    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)
    params: Sequence[str] | None = None
    members: Sequence[NamedOptimizer] = ()

    @classmethod
    def of(cls, value: Any) -> NamedOptimizer:
        """Read plain values. Keys beside ``class_path`` are arguments of the class, too.

        Raises:
            ConfigError: If the values have another form, or patterns are not of a chain's member.
        """
        named = cls._read(value, "optimizer")
        if named.params is not None and not named.members:
            raise ConfigError(
                f"optimizer {named.class_path} has params={list(named.params)}, which divide the "
                "parameters among the members of a ChainedOptimizer, and this optimizer is alone. "
                "Set train_only of the module to the patterns, which freezes all other parameters, "
                "or leave params out."
            )
        return named

    @classmethod
    def _read(cls, value: Any, place: str) -> NamedOptimizer:
        if isinstance(value, str):
            value = {"class_path": value}
        entry = _plain(value)
        if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
            raise ConfigError(
                f"{place} is {value!r}, without the class_path of an optimizer. Set "
                "class_path, such as torch.optim.SGD, and init_args with its arguments."
            )
        further = {key: entry.pop(key) for key in list(entry) if key not in _KEYS}
        init_args = {**(entry.get("init_args") or {}), **further}
        path, params = entry["class_path"], entry.get("params")
        if params is None:
            params = init_args.pop("params", None)
        if isinstance(params, str):
            params = [params]
        members: list[NamedOptimizer] = []
        if path.rpartition(".")[2] == ChainedOptimizer.__name__:
            members = [
                cls._read(member, f"{place}.optimizers[{index}]")
                for index, member in enumerate(init_args.pop("optimizers", ()))
            ]
            if not members or init_args:
                raise ConfigError(
                    f"{place} is a ChainedOptimizer with {len(members)} optimizers and the "
                    f"arguments {sorted(init_args)}. Set init_args.optimizers to a list of "
                    "{class_path, params, init_args}, and nothing else."
                )
            if params is not None:
                raise ConfigError(
                    f"{place} is a ChainedOptimizer with params={list(params)}. Set params of its "
                    "optimizers; train_only of the module freezes all other parameters."
                )
        return cls(class_path=path, init_args=init_args, params=params, members=members)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        values: dict[str, Any] = {"class_path": self.class_path, "init_args": dict(self.init_args)}
        if self.members:
            values["init_args"] = {"optimizers": [member.plain() for member in self.members]}
        if self.params is not None:
            values["params"] = list(self.params)
        return values

    def each(self) -> Iterator[NamedOptimizer]:
        """Yield the optimizers that step parameters: the members of a chain, or this one."""
        for member in self.members or (self,):
            yield from member.each() if member.members else (member,)

    def import_classes(self) -> None:
        """Import the modules of the classes, as typed by the user.

        Raises:
            ConfigError: If a module cannot be imported.
        """
        for member in self.each():
            module = member.class_path.rpartition(".")[0]
            try:
                import_module(module or "torch.optim")
            except ImportError as error:
                raise ConfigError(
                    f"optimizer is {member.class_path}, which cannot be imported ({error}). "
                    "Install its package, or set class_path to another class."
                ) from error
            member.check()

    def check(self) -> None:
        """Check the class and the names of the arguments.

        Raises:
            ConfigError: If the class is not imported, is no optimizer, or has no such argument.
        """
        parameters = inspect.signature(_class_of(self.class_path)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        for name in self.init_args:
            if name not in parameters:
                near = get_close_matches(name, parameters, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
                raise ConfigError(
                    f"optimizer {self.class_path} has no argument {name!r}, only "
                    f"{', '.join(list(parameters)[1:])}. {hint}"
                )

    def check_patterns(self, module: nn.Module) -> None:
        """Check the patterns against the full module: each takes a parameter, and each trained
        parameter has an optimizer.

        Raises:
            ConfigError: Naming the pattern and the nearest name, or the parameters left over.
        """
        members = list(self.each())
        if not self.members:
            return
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        shares = _shares(module, members)
        left_over = [name for name in names if not any(name in share for share in shares)]
        if left_over:
            raise ConfigError(
                f"no optimizer of the chain steps {len(left_over)} parameters, such as "
                f"{', '.join(left_over[:3])}. Leave out params of the last optimizer, which then "
                "steps the rest."
            )
        for member, share in zip(members, shares, strict=True):
            for pattern in member.params or ():
                if any(compile_pattern(pattern).fullmatch(name) for name in names):
                    continue
                near = nearest_pattern(pattern, names)
                raise ConfigError(
                    f"params of {member.class_path} have the pattern {pattern!r}, which matches no "
                    f"trained parameter of {type(module).__name__}"
                    + (f" (did you mean {near!r}?)." if near else ".")
                    + f" Parameters are called {', '.join(names[:2])}."
                )
            if not share:
                raise ConfigError(
                    f"{member.class_path} of the chain steps no parameter: optimizers before it "
                    "take all that its params match. Put it first, or remove it."
                )

    def make(
        self,
        module: nn.Module,
        table: Sequence[ParamGroup],
        learning_rate: float,
        scaling: Scaling | None = None,
    ) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's parameters.

        Args:
            module: Owner of the parameters.
            table: Rows of parameter groups.
            learning_rate: Peak learning rate, unless ``init_args`` have an ``lr``.
            scaling: Factors of maximal updates. None: none.

        Raises:
            ConfigError: If the class is unknown, or refuses its arguments or parameters.
        """
        members = list(self.each())
        shares: Sequence[set[str] | None] = [None]
        if self.members:
            shares = _shares(module, members)
        optimizers = [
            _make(member, share, module, table, learning_rate, scaling=scaling)
            for member, share in zip(members, shares, strict=True)
        ]
        return ChainedOptimizer(*optimizers) if self.members else optimizers[0]


def check_defaults(module: type, named: NamedOptimizer, settings: Mapping[str, Any]) -> None:
    """Check that options of AdamW, the optimizer by default, are not set beside another optimizer.

    Args:
        module: Class of the module.
        named: The other optimizer.
        settings: Values of the module's options.

    Raises:
        ConfigError: If one is set, or two learning rates are.
    """
    defaults = _defaults_of(module)
    for name in ("weight_decay", "betas", "eps", "fused"):
        if settings[name] != defaults[name]:
            raise ConfigError(
                f"{name}={settings[name]} is an option of AdamW, the optimizer by default, and "
                f"optimizer is {named.class_path}. Set {name} in init_args of the optimizer."
            )
    rates = {member.init_args.get("lr") for member in named.each()}
    rate = settings["learning_rate"]
    if None not in rates and rate != defaults["learning_rate"] and rates != {rate}:
        raise ConfigError(
            f"learning_rate is {rate}, and init_args of the optimizer have lr="
            f"{', '.join(sorted(map(str, rates)))}. Set one of them."
        )


def _defaults_of(module: type) -> dict[str, Any]:
    """Return the defaults of a module's options, those of subclasses first."""
    defaults: dict[str, Any] = {}
    for kind in module.__mro__:
        if "__init__" in vars(kind):
            for name, parameter in inspect.signature(vars(kind)["__init__"]).parameters.items():
                defaults.setdefault(name, parameter.default)
    return defaults


def _make(
    named: NamedOptimizer,
    share: set[str] | None,
    module: nn.Module,
    table: Sequence[ParamGroup],
    learning_rate: float,
    *,
    scaling: Scaling | None,
) -> torch.optim.Optimizer:
    kind = _class_of(named.class_path)
    named.check()
    rate = named.init_args.get("lr", learning_rate)
    scales = None
    if scaling is not None:
        scales = GroupScaling(scaling, kind, named.init_args.get("adjust_lr_fn"))
    groups = make_param_groups(module, table, lr=rate, only=share, scaling=scales)
    num_scales = 1 if scales is None else len(scales.scales)
    rows = [row for row in ({}, *(row.options for row in table)) for _ in range(num_scales)]
    for group, options in zip(groups, rows, strict=True):
        if "weight_decay" not in options:
            # The class has its own default, or the value in init_args.
            del group["weight_decay"]
        if share is not None:
            group["name"] = f"{kind.__name__}/{group['name']}"
    init_args = {key: _as_tuple(value) for key, value in named.init_args.items()}
    if "lr" in inspect.signature(kind).parameters:
        init_args["lr"] = rate
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **init_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {named.class_path} cannot be made with {dict(named.init_args)}: "
            f"{str(error).rstrip('.')}. "
            "Change init_args; an optimizer of matrices alone, such as Muon, is the first of a "
            "ChainedOptimizer (docs/training.md)."
        ) from error
    if share is None:  # a member of a chain may be another class than the option is for
        check_options(table, optimizer)
    for group, options in zip(optimizer.param_groups, rows, strict=True):
        if "weight_decay" in group and "weight_decay" not in options:
            group["weight_decay"] *= group["wd_mult"]
    scale_eps(optimizer)
    return optimizer


def _shares(module: nn.Module, members: Sequence[NamedOptimizer]) -> list[set[str]]:
    """Return the names of each member's parameters."""
    owners = tied_names(module)
    takes = [_taker(member, is_last=member is members[-1]) for member in members]
    shares: list[set[str]] = [set() for _ in members]
    for copy, parameter in module.named_parameters():
        name = owners.get(copy, copy)
        index = next((i for i, take in enumerate(takes) if take(name, parameter)), None)
        if index is not None:
            shares[index].add(copy)
    return shares


def _taker(member: NamedOptimizer, *, is_last: bool) -> Any:
    """Return the function of name and parameter that says whether a member of a chain steps the
    parameter.
    """
    patterns = [compile_pattern(pattern) for pattern in member.params or ()]
    is_of_matrices = issubclass(_class_of(member.class_path), torch.optim.Muon)

    def takes(name: str, parameter: nn.Parameter) -> bool:
        if is_of_matrices:
            is_convolution = parameter.ndim > 2 and parameter.shape[1] == 1  # depthwise
            if parameter.ndim not in _MATRIX_DIMS or is_convolution:
                return False
            if not patterns:
                return _IN_A_LAYER.search(name) is not None
        elif not patterns:
            return is_last
        return any(pattern.fullmatch(name) for pattern in patterns)

    return takes


def _class_of(path: str) -> type[torch.optim.Optimizer]:
    """Return an optimizer's class: torch's, ours, or of a module that is imported already.

    Raises:
        ConfigError: For any other path.
    """
    module, _, name = path.rpartition(".")
    found: Any = None
    if not module:
        module = "megatron_lightning.optim" if name in _OURS else "torch.optim"
    if module.partition(".")[0] in ("torch", "megatron_lightning"):
        try:
            found = getattr(import_module(module), name, None)
        except ImportError:
            found = None
    else:
        found = imported_class(path)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    reason = "is no optimizer" if found is not None else "is in no module imported so far"
    raise ConfigError(
        f"optimizer names {path}, which {reason}; only classes of torch and of this package are "
        "imported by name, since a checkpoint of somebody else could name any code. Import its "
        "module in your program, or give another: optimizer=... of the module and of "
        "load_from_checkpoint, --model.optimizer on the command line."
    )


def _as_tuple(value: Any) -> Any:
    """Return lists as tuples, as torch's optimizers have betas."""
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a copy with dicts in the place of mappings and namespaces."""
    if hasattr(value, "__dict__") and not isinstance(value, (Mapping, type)):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
