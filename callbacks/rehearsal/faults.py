"""Kinds of faults, with moment, rank and effect on a process."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from megatron_lightning.errors import ConfigError

FaultKind = Literal[
    "exception", "kill", "hang", "slow", "nan", "full_disk", "hanging_disk", "sigterm", "sigusr1"
]
LASTING = ("slow", "nan", "full_disk", "hanging_disk")
"""Kinds that last for several steps. The other kinds happen once."""
SIGNALS: Mapping[str, int] = MappingProxyType(
    {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1}
)
"""Signals to this process, by kind."""
_DISK = ("fsync", "write", "writev", "pwrite", "rename", "replace")
_STANDARD_STREAMS = 2  # descriptors up to here are no files of the run


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run."""

    kind: FaultKind
    """``exception``, ``kill`` (SIGKILL), ``hang`` (the main thread waits forever), ``slow``,
    ``nan`` (a gradient), ``full_disk`` (writes fail), ``hanging_disk`` (writes wait forever),
    ``sigterm``, or ``sigusr1`` (Slurm's signal before a time limit)."""
    step: int | tuple[int, int]
    """Optimizer steps done when the fault begins. Two numbers: drawn in between, both included."""
    rank: int | Literal["all", "any"] = "any"
    """Rank to fail. ``any``: drawn."""
    num_steps: int = 1
    """Steps for which a slow rank, NaN or a disk lasts."""
    seconds: float = 5.0
    """Delay of each step of a slow rank."""

    def __post_init__(self) -> None:
        first, last = self.step if isinstance(self.step, tuple) else (self.step, self.step)
        if self.kind not in get_args(FaultKind):
            raise ConfigError(f"kind is {self.kind!r}; it must be one of {get_args(FaultKind)}.")
        if not 0 <= first <= last:
            raise ConfigError(
                f"step of the fault {self.kind} is {self.step}: a fault begins after 0 or more "
                "steps. Set a number, or two in order."
            )
        if self.num_steps < 1 or self.seconds <= 0:
            raise ConfigError(
                f"the fault {self.kind} has num_steps={self.num_steps} and seconds={self.seconds}: "
                "nothing would happen. Set num_steps to at least 1, and seconds above 0."
            )

    def drawn(self, chance: random.Random, world_size: int) -> Fault:
        """Return the fault with a step and a rank, or "all".

        Raises:
            ConfigError: If no rank of the job has the number.
        """
        step = chance.randint(*self.step) if isinstance(self.step, tuple) else self.step
        rank = chance.randrange(world_size) if self.rank == "any" else self.rank
        if rank != "all" and not 0 <= rank < world_size:
            raise ConfigError(
                f"rank of the fault {self.kind} is {rank}, and the job has {world_size} ranks. Set "
                f'a rank below {world_size}, "any" or "all".'
            )
        return Fault(
            kind=self.kind, step=step, rank=rank, num_steps=self.num_steps, seconds=self.seconds
        )

    @property
    def first_step(self) -> int:
        """The step of a drawn fault."""
        return self.step[0] if isinstance(self.step, tuple) else self.step

    def hits(self, rank: int) -> bool:
        """Return whether a drawn fault is on ``rank``."""
        return self.rank in {"all", rank}


class InjectedFault(RuntimeError):
    """Exception of a rehearsal."""


def strike(kind: FaultKind) -> None:
    """Fail this process once.

    Raises:
        InjectedFault: For the kind ``exception``.
    """
    if kind == "exception":
        raise InjectedFault("a fault of FaultInjector: this rank fails on purpose.")
    if kind == "hang":
        threading.Event().wait()
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])


@contextmanager
def disk_fault(kind: FaultKind) -> Iterator[None]:
    """Enter in this process: the functions of ``os`` that write files fail, or never return.

    Files written by C code alone are not reached. A save ends with calls of Python in any case.
    """
    failing = {name: _Failing(kind, getattr(os, name)) for name in _DISK}
    for name, function in failing.items():
        setattr(os, name, function)
    try:
        yield
    finally:
        for name, function in failing.items():
            function.is_over = True
            # Faults end in any order: one below another stays until the upper one has ended.
            while isinstance(top := getattr(os, name), _Failing) and top.is_over:
                setattr(os, name, top.function)


@dataclass
class _Failing:
    """A function of ``os``, failing until the fault is over."""

    kind: FaultKind
    function: Callable[..., Any]
    is_over: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_over and not _is_standard(args):
            if self.kind == "full_disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            threading.Event().wait()
        return self.function(*args, **kwargs)


def _is_standard(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], int) and args[0] <= _STANDARD_STREAMS
