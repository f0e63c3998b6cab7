"""State of a stage's forward on one micro-batch, and facts about all forwards of a kind."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron_lightning.pipeline.stages.structure import Structure, load
from megatron_lightning.pipeline.stages.taint import Uses
from megatron_lightning.pipeline.stages.unit_values import Left


@dataclass
class CallFacts:
    """Facts about one kind of call of the pipelined module: hook, mode, kinds of arguments."""

    uses: Uses | None = None
    """Which units use which outputs; None: not known, and every output is carried."""
    written: set[int] = field(default_factory=set)
    """Units into whose outputs the model's code writes: it is given copies."""
    left: set[Left] = field(default_factory=set)
    """Attributes that units set on themselves in their forward."""
    draws_on_host: bool = False
    """Whether the forward draws from Python's or NumPy's generators."""
    tested: set[int] = field(default_factory=set)
    """Stages of this rank whose results were checked for the NaN of placeholders."""
    notes: dict[tuple[int, Hashable], tuple[str, dict[int, Structure]]] = field(
        default_factory=dict
    )
    """Structures of the outputs of the units before the end of a stage, by stage and signature."""
    received: dict[str, dict[int, Structure]] = field(default_factory=dict)
    """Structures by the notes in which they were received."""

    def carried(self, end: int) -> tuple[int, ...]:
        """Return the units whose outputs a message holds to the stage that begins with unit
        ``end``.
        """
        if end == 0:
            return ()
        return tuple(range(end)) if self.uses is None else self.uses.carried(end)

    def structures(self, note: str) -> dict[int, Structure]:
        """Return the structures in a note."""
        if note not in self.received:
            self.received[note] = load(note)
        return self.received[note]


@dataclass
class Visit:
    """One forward of a stage on a micro-batch."""

    stage: int
    first: int
    end: int
    carried: Collection[int]
    """Units whose outputs the next stage receives; empty on the last stage."""
    received: Mapping[int, tuple[Tensor, ...]]
    """Tensors of units before the stage, as far as they were sent."""
    structures: dict[int, Structure]
    """Structures of the outputs of the units before the end of the stage."""
    note: str | None
    """The structures for the next stage; None: own units have not run with this signature."""
    was_called_before: bool
    """Whether the step on the stage before has called the module."""
    seed: int
    """Seed of the forward between units, equal on all stages; a unit adds its number from 1 on."""
    sent: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Tensors of units for the next stage."""
    lent: list[tuple[int, Tensor, int]] = field(default_factory=list)
    """Unit, tensor and version of what the model's code was given and may not write into."""
    next: int = 0
    """Index of the unit that is called next."""
    records: bool = False
    """Whether the forward is recorded for a backward."""
    entered: bool = False
    """Whether the step has called the module, or a unit."""
