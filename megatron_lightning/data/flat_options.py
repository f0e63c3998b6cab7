"""Options of a constructor, declared once: the fields of a dataclass are the constructor's
parameters, for callers, configuration files and the command line alike.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
SelfT = TypeVar("SelfT")


def takes(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[SelfT, OptionsT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Decorate an ``__init__(self, options)`` to take the fields of a dataclass as parameters.

    Signature, types and descriptions are the dataclass's, whose docstring has a section ``Args``.
    A base class describes inherited fields.
    """

    def decorate(init: Callable[[SelfT, OptionsT], None]) -> Any:
        def __init__(self: SelfT, *args: P.args, **fields: P.kwargs) -> None:
            init(self, options(*args, **fields))

        signature = inspect.signature(options)
        hints = typing.get_type_hints(options)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typed = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
        described: Any = __init__
        described.__signature__ = signature.replace(
            parameters=[own, *typed], return_annotation=None
        )
        described.__annotations__ = {one.name: one.annotation for one in typed} | {"return": None}
        described.__doc__ = _description(options)
        described.__module__ = init.__module__
        described.__qualname__ = init.__qualname__
        return described

    return decorate


def _description(options: Any) -> str:
    """Return the section ``Args`` of a dataclass and its base classes."""
    try:
        import docstring_parser
    except ImportError:  # only the command line shows it, which needs the package itself
        return "Make the object of its options."
    texts: dict[str, str | None] = {}
    for kind in reversed(options.__mro__):
        for param in docstring_parser.parse(
            inspect.cleandoc(vars(kind).get("__doc__") or "")
        ).params:
            texts[param.arg_name] = param.description
    lines = [
        f"    {name}: {' '.join((texts.get(name) or '').split())}"
        for name in inspect.signature(options).parameters
    ]
    return "\n".join(["Make the object of its options.", "", "Args:", *lines])
