"""Signatures of the real Transformer Engine, and the record of calls that are bound to them."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

CONTRACT: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "oracles" / "te_contract.json").read_text()
)


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the real ``name`` with its defaults.

    Raises:
        TypeError: If it does not take them.
    """
    kinds = inspect._ParameterKind.__members__
    parameters = [
        inspect.Parameter(
            one["name"],
            kinds[one["kind"]],
            default=_value(one["default"]) if "default" in one else inspect.Parameter.empty,
        )
        for one in CONTRACT["signatures"][name]
    ]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"transformer_engine's {name}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _value(default: str) -> Any:
    try:
        return ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return None  # such as a dtype


@dataclass
class State:
    """State that the package keeps and tests look at."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Constructors and functions, with the arguments that were given."""
    first_flags: dict[int, list[bool | None]] = field(default_factory=dict)
    """``is_first_microbatch`` of a module's calls, by its number."""
    reductions: list[int] = field(default_factory=list)
    """Sizes of the groups over which largest values were reduced."""
    stack: list[tuple[bool, Any, Any]] = field(default_factory=list)
    """Enabled, recipe and group of the autocasts that are open."""
    histories: list[tuple[Any, Tensor]] = field(default_factory=list)
    """Group and history of every module with delayed scaling."""
    weights_recipe: Any = None
    """Recipe by which modules get quantized weights."""
    rounds_weights: bool = False
    """Whether modules without quantized weights multiply by rounded ones, too."""
    num_modules: int = 0
    recomputing: bool = False


STATE = State()
