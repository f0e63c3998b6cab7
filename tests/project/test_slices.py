"""The usual run and the slices of a week run every test once."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems


@dataclass(eq=False)
class _Item:
    nodeid: str
    markers: list[Any] = field(default_factory=list)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.markers if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.markers.append(mark.mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


def _items() -> list[_Item]:
    spread = [_Item(f"a.py::spread[{case}]", [pytest.mark.spread(2).mark]) for case in range(9)]
    slow = [_Item(f"b.py::slow[{case}]", [pytest.mark.slow.mark]) for case in range(12)]
    return [*spread, *slow, _Item("c.py::usual")]


def _chosen(is_slow: bool, part: str | None = None) -> list[str]:
    """Return the tests that a run has, as ``-m`` and ``--slice`` choose them."""
    items = _items()
    hook = pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: part), items)
    next(hook)
    items[:] = [item for item in items if item.is_slow == is_slow]
    with pytest.raises(StopIteration):
        next(hook)
    return [item.nodeid for item in items]


def test_usual_run_and_slices_have_every_test_once() -> None:
    usual = _chosen(False)
    slices = [_chosen(True, f"{day}/7") for day in range(7)]
    assert usual == ["a.py::spread[2]", "a.py::spread[6]", "c.py::usual"]
    assert {len(chosen) for chosen in slices} == {2, 3}
    assert sorted(sum(slices, usual)) == sorted(item.nodeid for item in _items())
