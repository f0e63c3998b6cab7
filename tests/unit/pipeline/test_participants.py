"""The list of a step's participants: their order, and that all are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lightning.step.participant import Participants, StepParticipant


class Noting(StepParticipant):
    def __init__(self, name: str, notes: list[str], allows: bool = True) -> None:
        self.name, self.notes, self.allows = name, notes, allows

    @contextmanager
    def repeated(self) -> Iterator[None]:
        self.notes.append(f"enter {self.name}")
        yield
        self.notes.append(f"leave {self.name}")

    def before_update(self) -> bool:
        self.notes.append(f"ask {self.name}")
        return self.allows


class Vetoing(Noting):
    vetoes = True


class Silent(StepParticipant):
    observer = None


def test_contexts_are_nested_in_order_and_every_participant_is_asked() -> None:
    notes: list[str] = []
    both = Participants([Silent(), Vetoing("first", notes, allows=False), Noting("second", notes)])
    with both.repeated():
        notes.append("inside")
    assert not both.before_update()
    assert notes == [
        *("enter first", "enter second", "inside", "leave second", "leave first"),
        *("ask first", "ask second"),
    ]
    assert both.vetoes and not both.observers


def test_without_participants_nothing_is_refused() -> None:
    nobody = Participants([Silent()])
    assert nobody.before_update() and not nobody.vetoes and nobody.tensors() == []
