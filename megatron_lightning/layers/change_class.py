"""Change the class of a user's module in place. The object, its hooks and attributes stay.

A class richer than ``nn.Linear`` (a marker, for example) stays as a second base, so ``isinstance``
answers as before.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

from torch import nn

from megatron_lightning.errors import ShardingError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def change_class(module: nn.Module, kind: type[ModuleT], **attributes: Any) -> ModuleT:
    """Make ``module`` compute as a ``kind``, in place, set ``attributes``, and return the module.

    The module stays an instance of its original class.

    Raises:
        ShardingError: If the user already set one of the attributes on the module.
    """
    conflicts = [name for name in attributes if name in vars(module)]
    if conflicts:
        raise ShardingError(
            f"a {type(module).__name__} has an attribute {', '.join(conflicts)} of its own, and "
            f"{kind.__name__}, which takes its place, needs the name. Rename the attribute."
        )
    own: Any = type(module)
    target: Any = kind
    module.__class__ = kind if issubclass(kind, own) else _joined(target, own)
    for name, value in attributes.items():
        setattr(module, name, value)
    return cast(ModuleT, module)


@contextmanager
def changed_class(module: nn.Module, kind: type[ModuleT], **attributes: Any) -> Iterator[ModuleT]:
    """Change ``module`` like :func:`change_class`.

    A ShardingError in the block restores the module.
    """
    own, before = type(module), dict(vars(module))
    changed = change_class(module, kind, **attributes)
    try:
        yield changed
    except ShardingError:
        module.__class__ = own
        vars(module).clear()
        vars(module).update(before)
        raise


# One class for each pair of classes, because compiled graphs are cached by class.
@cache
def _joined(kind: Any, own: Any) -> Any:
    """Return a class that computes as ``kind`` and also is a subclass of ``own``."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # found by no name
        _, _, *state = super(joined, self).__reduce_ex__(protocol)
        return _new, (kind, own), *state

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {
            "__reduce_ex__": reduce,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        }

    joined: Any = types.new_class(kind.__name__, (kind, own), exec_body=fill)
    return joined


def _new(kind: Any, own: Any) -> Any:
    """Return an empty module, for copies and pickles."""
    joined = _joined(kind, own)
    return joined.__new__(joined)
