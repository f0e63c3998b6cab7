"""Data of a pipeline schedule: actions, the placement of stages, and the table itself. No torch
here.

Notation of this package: P pipeline ranks ("pp rank" p), S stages of the model in order (s), M
micro-batches (m). A *stage* is a position in the model, a *pp rank* a position in the pipeline
group. A :class:`Placement` maps stages to pp ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_lightning.errors import ConfigError


class Kind(str, Enum):
    """Kind of work on a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    """First half of a split backward: the gradient of the stage's input, needed by the stage
    before."""
    WEIGHT_GRADIENT = "W"
    """Second half of a split backward: the gradient of the stage's weights, needed by no other
    stage."""

    __hash__ = str.__hash__  # Enum's own is Python code, and tables are looked up by action


SENDS_GRADIENT = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""Kinds that allow the stage before to do its own backward."""


class Action(NamedTuple):
    """One unit of work of a stage. The text form is ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form."""
        match = re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a pipeline action; write stage, kind (F forward, B backward, I "
                "input gradient, W weight gradient) and micro-batch, such as 2F0."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True)
class Placement:
    """Map from stages to pipeline ranks.

    The last stage is always on pp rank 0, so that global rank 0, the rank that writes logs, has the
    loss.
    """

    pp_ranks: tuple[int, ...]
    """Pipeline rank of each stage, in stage order."""

    def __post_init__(self) -> None:
        if not self.pp_ranks or self.pp_ranks[-1] != 0:
            raise ConfigError(
                f"placement {self.pp_ranks} does not put the last stage on pp rank 0, whose rank "
                "logs the loss. End the placement with 0."
            )
        if set(self.pp_ranks) != set(range(self.num_ranks)):
            raise ConfigError(
                f"placement {self.pp_ranks} leaves a pp rank below {self.num_ranks} without a "
                "stage. Give each pp rank a stage."
            )

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Return the placement of interleaved schedules: around the pp ranks, from the highest
        down, once a chunk.
        """
        return cls(tuple(reversed(range(num_ranks))) * num_chunks)

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Return the placement of V schedules: up the pp ranks and down again, two stages on
        each.
        """
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.pp_ranks)

    @property
    def num_ranks(self) -> int:
        """Size of the pipeline group."""
        return max(self.pp_ranks) + 1

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pp rank, ascending."""
        return tuple(stage for stage, holder in enumerate(self.pp_ranks) if holder == pp_rank)


@dataclass(frozen=True)
class Schedule:
    """Order of work of a pipeline run, as a table."""

    name: str
    """Name in messages."""
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """Actions in order of execution, for each pp rank."""

    @cached_property
    def positions(self) -> dict[Action, int]:
        """Position of every action in the list of the action's pp rank."""
        return {
            action: position for actions in self.actions for position, action in enumerate(actions)
        }

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed after input gradients, by actions of their own."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for row in self.actions for action in row)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Most (stage, micro-batch) activations held at once on each pp rank."""
        return tuple(
            max(accumulate(map(_change_in_flight, actions)), default=0) for actions in self.actions
        )

    def __str__(self) -> str:
        """A line for each pp rank: ``0: 1F0 1B0 …``."""
        return "\n".join(
            f"{pp_rank}: {' '.join(map(str, actions))}"
            for pp_rank, actions in enumerate(self.actions)
        )


def _change_in_flight(action: Action) -> int:
    if action.kind is Kind.FORWARD:
        return 1
    return 0 if action.kind is Kind.INPUT_GRADIENT else -1
