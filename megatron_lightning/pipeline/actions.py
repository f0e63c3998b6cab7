"""The words a pipeline schedule is written in: actions, where stages live, and the table itself. No torch here.

Notation of this package: P pipeline coordinates ("pp rank" p), S stages of the model in order (s), M micro-batches (m).
A *stage* is a position in the model, a *coordinate* a position in the pipeline group; a :class:`Placement` maps the one
to the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from megatron_lightning.errors import ConfigError


class Kind(str, Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    """First half of a split backward: the gradient of the stage's input, which the stage before waits for."""
    WEIGHT_GRADIENT = "W"
    """Second half of a split backward: the gradient of the stage's weights, which nobody waits for."""

    __hash__ = str.__hash__  # Enum's own is Python code, and tables are looked up by action


SENDS_GRADIENT = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""Kinds after which the stage before can do its own backward."""


class Action(NamedTuple):
    """One unit of work of one stage; its text form is ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            ConfigError: If ``text`` is not an action.
        """
        match = re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a pipeline action; write stage, kind (F forward, B backward, I input gradient, W weight "
                "gradient) and micro-batch, such as 2F0."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True)
class Placement:
    """Which pipeline coordinate holds each stage.

    The last stage is always on coordinate 0, so that global rank 0, whose loggers write, has the loss.

    Raises:
        ConfigError: If a coordinate is left without a stage, or the last stage is elsewhere.
    """

    coordinates: tuple[int, ...]
    """Coordinate of each stage, in stage order."""

    def __post_init__(self) -> None:
        if not self.coordinates or self.coordinates[-1] != 0:
            raise ConfigError(
                f"placement {self.coordinates} does not put the last stage on coordinate 0, whose rank logs the loss. "
                "End the placement with 0."
            )
        if set(self.coordinates) != set(range(self.num_coordinates)):
            raise ConfigError(
                f"placement {self.coordinates} leaves a coordinate below {self.num_coordinates} without a stage. "
                "Give each coordinate a stage."
            )

    @classmethod
    def loop(cls, num_coordinates: int, num_chunks: int = 1) -> Placement:
        """Return the placement of interleaved schedules: around the coordinates, from the highest down, once a chunk."""
        return cls(tuple(reversed(range(num_coordinates))) * num_chunks)

    @classmethod
    def v(cls, num_coordinates: int) -> Placement:
        """Return the placement of V schedules: up the coordinates and down again, two stages on each."""
        return cls((*range(num_coordinates), *reversed(range(num_coordinates))))

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.coordinates)

    @property
    def num_coordinates(self) -> int:
        """Size of the pipeline group."""
        return max(self.coordinates) + 1

    def stages_of(self, coordinate: int) -> tuple[int, ...]:
        """Return the stages on one coordinate, ascending."""
        return tuple(stage for stage, holder in enumerate(self.coordinates) if holder == coordinate)


@dataclass(frozen=True)
class Schedule:
    """The order of work of a whole pipeline step, as a table."""

    name: str
    """What to call it in messages."""
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """Actions in order of execution, for each coordinate."""

    @cached_property
    def positions(self) -> dict[Action, int]:
        """Position of every action in its coordinate's list."""
        return {action: position for actions in self.actions for position, action in enumerate(actions)}

    def __str__(self) -> str:
        """One line a coordinate: ``0: 1F0 1B0 …``."""
        return "\n".join(f"{coordinate}: {' '.join(map(str, actions))}" for coordinate, actions in enumerate(self.actions))
