"""Arguments of Megatron's configurations and of NeMo's strategy, given to the strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from megatron_lightning.names.lookup import answer_for_argument

Self = TypeVar("Self")
P = ParamSpec("P")


def answering_other_names(
    init: Callable[Concatenate[Self, P], None],
) -> Callable[Concatenate[Self, P], None]:
    """Return ``init``, which answers an argument of Megatron or NeMo with the argument here.

    Raises:
        TypeError: From ``init``, for an argument of another library.
    """
    known = inspect.signature(init).parameters

    @wraps(init)
    def answering(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        found = {name: answer_for_argument(name) for name in kwargs if name not in known}
        if any(found.values()):
            answers = "; ".join(filter(None, found.values()))
            raise TypeError(f"{type(self).__name__} got unexpected arguments: {answers}.")
        init(self, *args, **kwargs)

    return answering
