"""Find a rank that blocks other ranks. When no batch ends in time, or a setup, a save or a
validation takes too long, a thread of each rank publishes the rank's position through the job's
store, and a single rank prints all positions.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lightning import compat
from megatron_lightning.resilience.failure import print_message
from megatron_lightning.resilience.stacks import (
    Position,
    describe,
    last_collectives,
    main_stack,
    stack_of,
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
    is_section: bool
    """Whether a section takes too long, and no batch."""


@dataclass
class Timed:
    """Duration of one activity, now and at its longest."""

    name: str
    """Name in alarms."""
    label: str
    """Completes "rank 0 has …"."""
    at_first_s: float
    """Limit until the activity has been seen once. Infinite: none."""
    longest_s: float | None = None
    """Longest duration so far. None: not seen yet."""
    since: float | None = None
    """Begin. None: the activity is not going on."""
    patience: int = 1
    """Factor of the limit. Doubles with every alarm, until the activity ends."""

    def begin(self, now: float) -> None:
        """Begin, unless begun."""
        self.since = now if self.since is None else self.since

    def end(self, now: float) -> None:
        """End, and learn the duration."""
        if self.since is not None:
            self.longest_s = max(self.longest_s or 0.0, now - self.since)
        self.since, self.patience = None, 1

    def limit_s(self, factor: float, at_least_s: float) -> float:
        """Return the seconds after which the activity counts as a hang."""
        learned = self.longest_s is not None
        first = max(at_least_s, factor * (self.longest_s or 0.0))
        return (first if learned else self.at_first_s) * self.patience


SECTIONS: Mapping[str, str] = {
    "setup": "been in the setup",
    "save": "been in a save",
    "validation": "been in one validation",
}
"""Parts of a run that may have limits, beside the batches."""
_WRITING = "writing"  # of the save in the background
_ACTIVITIES: Mapping[str, str] = {
    "setup": "the setup", "save": "a save", _WRITING: "the writing of a save",
    "validation": "a validation",
}  # fmt: skip


class HangMonitor:
    """Thread to measure the duration of the current batch, and of the current section of the run.

    Args:
        rank: Rank of this process.
        world_size: Ranks of the job.
        factor: Multiple of the longest batch or section counted as a hang.
        at_least_s: Shortest duration of a hang, in seconds.
        on_hang: Called on a single rank, from the thread, after the hang is printed.
        sections: Limits in seconds by key of ``SECTIONS``, until the section has been seen once.
            A section left out has no limit.
        writing_since: Returns the begin of the save now written in the background, in seconds of
            ``time.monotonic()``, or None.
        writer: Name of the thread that writes in the background.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        factor: float,
        at_least_s: float,
        on_hang: Callable[[Hang], None],
        sections: Mapping[str, float] = MappingProxyType({}),
        writing_since: Callable[[], float | None] = lambda: None,
        writer: str = "",
    ) -> None:
        store: compat.Store = compat.default_store() if world_size > 1 else compat.HashStore()
        number = store.add(f"megatron_lightning/hangs/{rank}", 1)
        self._store = compat.PrefixStore(f"megatron_lightning/hang/{number}", store)
        self._rank = rank
        self._world_size = world_size
        self._factor = factor
        self._at_least_s = at_least_s
        self._on_hang = on_hang
        self._writing_since = writing_since
        self._writer = writer
        self._batches = {
            activity: Timed(f"{activity} batch", "ended no batch", math.inf)
            for activity in ("training", "validation")
        }
        self._sections = {
            name: Timed(name, SECTIONS[name], limit_s) for name, limit_s in sections.items()
        }
        if "save" in sections:
            self._sections[_WRITING] = Timed(_WRITING, "been writing a save", sections["save"])
        self._activity = ""
        self._step = 0
        self._alarms = 0
        shortest_s = min([at_least_s, *sections.values()])
        self._poll_s = max(min(1.0, shortest_s / 4), world_size * _STORE_SECONDS_PER_RANK)
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
        if activity != self._activity:
            self.pause()
            self._activity = activity
        self._batches[activity].begin(time.monotonic())

    def end(self, activity: str, step: int) -> None:
        """End a batch, and begin the next batch."""
        batch, now = self._batches[activity], time.monotonic()
        if batch.longest_s is None:  # connections and caches: no measure of the next batches
            batch.since = now
        batch.end(now)
        batch.begin(now)
        self._activity, self._step = activity, step

    def pause(self) -> None:
        """Ignore the time of other work, such as a save, until the next batch begins."""
        for batch in self._batches.values():
            batch.since = None

    def enter(self, section: str) -> None:
        """Begin a section, unless begun. Sections without a limit are ignored."""
        if section in self._sections:
            self._sections[section].begin(time.monotonic())

    def leave(self, section: str) -> None:
        """End a section, and learn its duration. No-op outside of the section."""
        if section in self._sections:
            self._sections[section].end(time.monotonic())

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self._poll_s):
                self._follow_writing()
                alarm = f"alarm/{self._alarms}"
                for timed, late_s, limit_s in self._late():
                    text = (
                        f"rank {self._rank} has {timed.label} for {late_s:.1f} s (limit "
                        f"{limit_s:.1f} s)"
                    )
                    self._store.compare_set(alarm, "", json.dumps([timed.name, text]))
                if self._store.check([alarm]):
                    self._answer()
        except RuntimeError:
            return  # the store has ended, and so does the job

    def _follow_writing(self) -> None:
        """Begin and end the section of the save written in the background."""
        writing = self._sections.get(_WRITING)
        since = None if writing is None else self._writing_since()
        if writing is not None and since != writing.since:
            writing.end(time.monotonic())
            writing.since = since

    def _late(self) -> list[tuple[Timed, float, float]]:
        """Return times, seconds and limit of everything that takes too long."""
        now, found = time.monotonic(), []
        for timed in (*self._batches.values(), *self._sections.values()):
            since, limit_s = timed.since, timed.limit_s(self._factor, self._at_least_s)
            if since is not None and now - since > limit_s:
                found.append((timed, now - since, limit_s))
        return found

    def _answer(self) -> None:
        """Publish this rank's position. A single rank reads all positions."""
        number, now = self._alarms, time.monotonic()
        name, _ = json.loads(self._store.get(f"alarm/{number}"))
        timed = [*self._batches.values(), *self._sections.values()]
        late = next(one for one in timed if one.name == name)
        late.patience *= 2
        # The main thread may go on while a thread of its own writes.
        stack = stack_of(self._writer) if name == _WRITING else []
        position = Position(
            self._rank, self._step, self._activity_in(name),
            0.0 if late.since is None else now - late.since,
            stack or main_stack(), last_collectives(),
        )  # fmt: skip
        self._store.set(f"position/{number}/{self._rank}", json.dumps(position.as_dict()))
        self._alarms += 1
        if self._store.compare_set(f"reader/{number}", "", str(self._rank)) != (
            str(self._rank).encode()
        ):
            return
        hang = self._read(number)
        if hang is not None:
            print_message(f"{hang.headline}\n{hang.text}")
            self._on_hang(hang)

    def _activity_in(self, alarm: str) -> str:
        """Return this rank's activity, to print beside the stack."""
        if alarm in self._sections:
            return _ACTIVITIES[alarm]
        return self._activity or "its first batch"

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
        name, alarm = json.loads(self._store.get(f"alarm/{number}"))
        late = suspects(positions, silent)
        waited = ", ".join(map(str, late[:8]))
        who = f"; the others wait for rank {waited}" if 0 < len(late) < self._world_size else ""
        text = describe(positions, silent)
        return Hang(f"hang: {alarm}{who}", text, late, is_section=name in self._sections)
