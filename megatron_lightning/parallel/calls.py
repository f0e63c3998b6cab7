"""Comparison of the calls that lead the ranks of a group to a collective of objects.

A collective does not know what it is for. A call on a single rank, under ``if
trainer.is_global_zero``, meets the other ranks' next collective there, and values of two kinds
would be mixed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_lightning.errors import RankError
from megatron_lightning.parallel.origin import is_library_module


class Call(NamedTuple):
    """A rank's way to a collective."""

    site: str
    """Function with the collective, and the function's module."""
    name: str
    """Function called by the user's code."""
    where: str
    """File and line of the user's code."""


def current_call(depth: int) -> Call:
    """Return the call of the function ``depth`` frames above the caller."""
    frame = sys._getframe(depth + 1)
    site = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    name = frame.f_code.co_name
    while frame.f_back is not None and is_library_module(str(frame.f_globals.get("__name__"))):
        name, frame = frame.f_code.co_name, frame.f_back
    return Call(site, name, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")


def check_calls(ranks: Sequence[int], calls: Sequence[Any]) -> None:
    """Check that the ranks of a group came to a collective by the same function.

    Args:
        ranks: Global ranks of the group.
        calls: By rank. Anything but a :class:`Call` is of a collective outside of this package.

    Raises:
        RankError: Naming two ranks and their calls.
    """
    sites = [call.site if isinstance(call, Call) else None for call in calls]
    if len({*sites}) == 1:
        return
    differing = next(i for i, site in enumerate(sites) if site != sites[0])
    sides = " and ".join(
        f"rank {ranks[i]} has called {calls[i].name} ({calls[i].where})"
        if isinstance(calls[i], Call)
        else f"rank {ranks[i]} another collective"
        for i in (0, differing)
    )
    raise RankError(
        f"ranks make different calls of those that all ranks make together: {sides}. Call it on "
        "all ranks, not under `if trainer.is_global_zero`, and use the returned values on one rank."
    )
