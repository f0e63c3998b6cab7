"""Restarts inside of the processes: how often, and the meeting of all ranks between two runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError

_VARIABLE = "MEGATRON_LIGHTNING_RESTART"  # of attempts with a possible next attempt
_MEET_S = 60.0  # ranks leave a run within seconds of each other
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often a run is started again in the same processes.

    Raises:
        ConfigError: If the number is negative.
    """

    in_process: int = 0
    """Restarts after exceptions. Only the launcher can start a killed process again."""

    def __post_init__(self) -> None:
        if self.in_process < 0:
            raise ConfigError(
                f"restarts.in_process is {self.in_process}. Set it to 0 for none, or to a positive "
                "number."
            )


def restarts_in_process() -> bool:
    """Whether a failure of this run is followed by another run in the same processes."""
    return _VARIABLE in os.environ


def is_restarted() -> bool:
    """Whether this run follows a failed run in the same processes."""
    return os.environ.get(_VARIABLE, "0") != "0"


@contextmanager
def attempt_in_process(number: int, *, is_last: bool) -> Iterator[None]:
    """Context of a run: failures of other ranks wake this process instead of ending the process,
    except in the last attempt.
    """
    os.environ.pop(_VARIABLE, None)  # set by the starter, in a started process
    if not is_last:
        os.environ[_VARIABLE] = str(number)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


class Meeting:
    """Meeting of all ranks after a failed run, over the job's store.

    Args:
        store: The job's store, kept alive by the serving process.
        attempt: Number of the failed run.
        world_size: Ranks of the job.
    """

    def __init__(self, store: compat.Store, attempt: int, world_size: int) -> None:
        self._store = compat.PrefixStore(f"megatron_lightning/restart/{attempt}", store)
        self._world_size = world_size

    def cancel(self) -> None:
        """Announce to all other ranks that this rank will not come."""
        self._store.set("cancelled", "1")

    def wait(self) -> bool:
        """Wait for all ranks. Return whether all ranks came."""
        deadline = time.monotonic() + _MEET_S
        arrived = self._store.add("arrived", 1)
        while arrived < self._world_size:
            if self._store.check(["cancelled"]) or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
            arrived = self._store.add("arrived", 0)
        return True
