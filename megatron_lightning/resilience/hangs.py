"""Find a rank that blocks other ranks. When no batch ends in time, a thread of each rank publishes
the rank's position through the job's store, and a single rank prints all positions.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_lightning import compat
from megatron_lightning.resilience.failure import print_message
from megatron_lightning.resilience.stacks import (
    Position,
    describe,
    last_collectives,
    main_stack,
    suspects,
)

_ANSWER_S = 5.0  # for all ranks to publish their positions
_STORE_SECONDS_PER_RANK = 1e-3


@dataclass(frozen=True)
class Hang:
    """A hang, seen from a rank."""

    headline: str
    """One line with the observing rank and the time without the end of a batch."""
    text: str
    """Positions of all ranks."""
    suspects: list[int]
    """Ranks awaited by all other ranks."""


class HangMonitor:
    """Thread to measure the duration of the current batch.

    Args:
        rank: Rank of this process.
        world_size: Ranks of the job.
        factor: Multiple of the longest batch counted as a hang.
        at_least_s: Shortest duration of a hang, in seconds.
        on_hang: Called on a single rank, from the thread, after the hang is printed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        factor: float,
        at_least_s: float,
        on_hang: Callable[[Hang], None],
    ) -> None:
        store: compat.Store = compat.default_store() if world_size > 1 else compat.HashStore()
        number = store.add(f"megatron_lightning/hangs/{rank}", 1)
        self._store = compat.PrefixStore(f"megatron_lightning/hang/{number}", store)
        self._rank = rank
        self._world_size = world_size
        self._factor = factor
        self._at_least_s = at_least_s
        self._on_hang = on_hang
        self._longest_s: dict[str, float] = {}  # by activity, from the first batch on
        self._activity = ""
        self._since: float | None = None  # None: nothing is due
        self._step = 0
        self._alarms = 0
        self._patience = 1  # doubles with every alarm, until a batch ends
        self._poll_s = max(min(1.0, at_least_s / 4), world_size * _STORE_SECONDS_PER_RANK)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. No-op when stopped already."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def begin(self, activity: str) -> None:
        """Begin a batch, unless a batch has begun. The first batch of an activity may take any
        time.
        """
        if self._since is None or self._activity != activity:
            self._activity = activity
            self._since = time.monotonic() if activity in self._longest_s else None

    def end(self, activity: str, step: int) -> None:
        """End a batch, and begin the next batch."""
        now, longest = time.monotonic(), self._longest_s.get(activity)
        if longest is None:
            self._longest_s[activity] = 0.0
        elif self._since is not None:
            self._longest_s[activity] = max(longest, now - self._since)
        self._activity, self._step, self._since, self._patience = activity, step, now, 1

    def pause(self) -> None:
        """Ignore the time of other work, such as a save, until the next batch begins."""
        self._since = None

    @property
    def limit_s(self) -> float:
        """Seconds after which a batch counts as a hang. Infinite while nothing is due."""
        if self._since is None:
            return math.inf
        longest = self._longest_s.get(self._activity, 0.0)
        return max(self._at_least_s, self._factor * longest) * self._patience

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self._poll_s):
                alarm, since = f"alarm/{self._alarms}", self._since
                late_s = 0.0 if since is None else time.monotonic() - since
                if late_s > self.limit_s:
                    text = (
                        f"rank {self._rank} has ended no batch for {late_s:.1f} s (limit "
                        f"{self.limit_s:.1f} s)"
                    )
                    self._store.compare_set(alarm, "", text)
                if self._store.check([alarm]):
                    self._answer(late_s)
        except RuntimeError:
            return  # the store has ended, and so does the job

    def _answer(self, late_s: float) -> None:
        """Publish this rank's position. A single rank reads all positions."""
        number = self._alarms
        position = Position(
            self._rank, self._step, self._activity or "its first batch", late_s, main_stack(),
            last_collectives(),
        )  # fmt: skip
        self._store.set(f"position/{number}/{self._rank}", json.dumps(position.as_dict()))
        self._alarms += 1
        self._patience *= 2
        if self._store.compare_set(f"reader/{number}", "", str(self._rank)) != (
            str(self._rank).encode()
        ):
            return
        hang = self._read(number)
        if hang is not None:
            print_message(f"{hang.headline}\n{hang.text}")
            self._on_hang(hang)

    def _read(self, number: int) -> Hang | None:
        """Return the hang from the positions of all ranks. None: a rank compiles, and all other
        ranks wait.
        """
        keys = {rank: f"position/{number}/{rank}" for rank in range(self._world_size)}
        deadline = time.monotonic() + _ANSWER_S
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.1)
        keys_there = [key for key in keys.values() if self._store.check([key])]
        positions = [Position.of(json.loads(self._store.get(key))) for key in keys_there]
        silent = [rank for rank, key in keys.items() if key not in keys_there]
        if any(position.compiles for position in positions):
            return None
        alarm = self._store.get(f"alarm/{number}").decode()
        late = suspects(positions, silent)
        waited = ", ".join(map(str, late[:8]))
        who = f"; the others wait for rank {waited}" if 0 < len(late) < self._world_size else ""
        return Hang(f"hang: {alarm}{who}", describe(positions, silent), late)
