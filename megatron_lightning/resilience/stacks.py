"""The position of a rank: the stack of the main thread and the last collectives, even of a blocked
rank.

A thread can read the main thread's stack at any time: waits of gloo and NCCL release the
interpreter. torch's flight recorder numbers the collectives of every process group. A rank with a
smaller number than another rank of the group is behind.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from megatron_lightning import compat

_NUM_FRAMES = 60
_WAITS = (
    "torch/distributed/", "pipeline/channel.py", "megatron_lightning/launch/ranks.py",
    "parallel/collectives.py", "parallel/cpu_exchange.py", "parallel/sequence_exchange.py",
)  # fmt: skip
# Compiled code and kernels of custom operators, such as the collectives of tensor parallelism, have
# torch/_dynamo/eval_frame.py on the stack. A wait in such code is no compilation.
_COMPILES = (
    "torch/_dynamo/convert_frame.py", "compile_fx_inner (torch/_inductor/",
    "precompile (torch/_inductor/", "benchmark_all_configs (torch/_inductor/",
    "coordinate_descent_tuning (torch/_inductor/", "triton/compiler/",
)  # fmt: skip
_INNERMOST = 8  # frames searched for a wait


@dataclass(frozen=True)
class Position:
    """Position of a rank."""

    rank: int
    step: int
    """Optimizer steps done."""
    activity: str
    """Phase of the run, such as "training"."""
    seconds: float
    """Since the begin of what takes too long, such as a batch."""
    stack: list[str]
    """Frames of the main thread, or of the thread that saves, the innermost first, and frames of a
    compilation further out."""
    collectives: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Process group -> number of the group's collectives begun by this rank, and the last
    collective."""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks."""
        return any(part in frame for frame in self.stack[:_INNERMOST] for part in _WAITS)

    @property
    def compiles(self) -> bool:
        """Whether the rank compiles."""
        return any(map(_is_compilation, self.stack))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Position:
        """Return the position described by :meth:`as_dict`."""
        collectives = {
            name: (int(n), str(last)) for name, (n, last) in values["collectives"].items()
        }
        return cls(**{**values, "collectives": collectives})


def main_stack() -> list[str]:
    """Return the innermost frames of this process's main thread, the innermost first.

    Frames of a compilation further out are included: a compiler's own stack may be deeper.
    """
    return _stack(threading.main_thread())


def stack_of(name: str) -> list[str]:
    """Return the innermost frames of the thread of a name. Empty if there is no such thread."""
    return next((_stack(thread) for thread in threading.enumerate() if thread.name == name), [])


def _stack(thread: threading.Thread) -> list[str]:
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    stack: list[str] = []
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
        path = code.co_filename.rpartition("site-packages/")[2]
        text = f"{name} ({path}:{frame.f_lineno})"
        if len(stack) < _NUM_FRAMES or _is_compilation(text):
            stack.append(text)
        frame = frame.f_back
    return stack


def _is_compilation(frame: str) -> bool:
    return any(part in frame for part in _COMPILES)


def last_collectives() -> dict[str, tuple[int, str]]:
    """Return, by process group, the number of collectives begun by this rank, and the last
    collective.
    """
    last: dict[str, tuple[int, str]] = {}
    for record in compat.flight_records():
        number = int(record.get("collective_seq_id") or 0)
        group = record.get("process_group")
        name = "/".join(map(str, group)) if isinstance(group, list | tuple) else str(group)
        if number >= last.get(name, (0, ""))[0]:
            kind = str(record.get("profiling_name", "")).rpartition(":")[2]
            last[name] = (number, f"{kind} {record.get('input_sizes', '')}".strip())
    return last


def describe(positions: Sequence[Position], silent: Sequence[int], num_frames: int = 6) -> str:
    """Return the stacks of the hanging ranks. Ranks with equal stacks are grouped, and ranks
    without a wait come first.
    """
    groups: dict[tuple[bool, str, tuple[str, ...]], list[Position]] = defaultdict(list)
    for position in positions:
        key = (position.waits, position.activity, tuple(position.stack[:num_frames]))
        groups[key].append(position)
    lines = []
    for (waits, activity, stack), members in sorted(
        groups.items(), key=lambda item: (item[0][0], len(item[1]))
    ):
        ranks = _ranks([member.rank for member in members])
        state = "wait for other ranks" if waits else "wait for nobody"
        state = state if len(members) > 1 else state.replace("wait", "waits", 1)
        lines.append(f"  {ranks} {state}, in {activity} after step {members[0].step}:")
        lines += [f"      {frame}" for frame in stack]
    lines += _behind(positions)
    if silent:
        lines.append(f"  no answer from {_ranks(silent)}: killed, stopped, or their node is gone")
    return "\n".join(lines)


def suspects(positions: Sequence[Position], silent: Sequence[int]) -> list[int]:
    """Return the ranks awaited by other ranks, as far as stacks and collectives show."""
    working = [position.rank for position in positions if not position.waits]
    late = {rank for ranks in _late(positions).values() for rank in ranks}
    return [*silent, *([rank for rank in working if rank in late] or working)]


def _late(positions: Sequence[Position]) -> dict[str, list[int]]:
    """Return, by process group, the ranks with fewer begun collectives than another rank."""
    late = {}
    for name, ranks in _by_group(positions).items():
        most = max(number for number, _ in ranks.values())
        late[name] = sorted(rank for rank, (number, _) in ranks.items() if number < most)
    return {name: ranks for name, ranks in late.items() if ranks}


def _by_group(positions: Sequence[Position]) -> dict[str, dict[int, tuple[int, str]]]:
    groups: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
    for position in positions:
        for name, last in position.collectives.items():
            groups[name][position.rank] = last
    return groups


def _behind(positions: Sequence[Position]) -> list[str]:
    """Return a line for every process group with ranks behind."""
    lines, groups = [], _by_group(positions)
    for name, late in sorted(_late(positions).items(), key=lambda item: item[0].rpartition("/")[2]):
        ahead, (most, last) = max(groups[name].items(), key=lambda item: item[1][0])
        lines.append(
            f"  group {name.rpartition('/')[2]} of {_ranks(sorted(groups[name]))}: {_ranks(late)} "
            f"behind, at collective {min(groups[name][rank][0] for rank in late)}; rank {ahead} "
            f"waits in {most}, {last}"
        )
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
