"""Values that a step changes on a module, sent from one stage to another: here two copies of one
module in one process."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from megatron_lightning.pipeline.batch.module_state import ModuleState
from megatron_lightning.pipeline.batch.records import MOST_ENTRIES, attributes_of


class _Meter:
    """As in many public training scripts."""

    def __init__(self) -> None:
        self.sum, self.count, self.window = 0.0, 0, deque(maxlen=3)

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.window.append(value)


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class _Module(nn.Module):
    of_class: dict[str, int] = {}  # noqa: RUF012 (as users write it)

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.part, self.metric = _Part(), _Part(), SumMetric()
        self.register_buffer("buffer", torch.zeros(2))
        self.number, self.flag, self.text, self.nothing = 1, False, "a", None
        self.rate = float("nan")
        self.total = torch.zeros((), dtype=torch.int64)
        self.vector = torch.zeros(3)
        self.half = torch.zeros(2, dtype=torch.bfloat16)
        self.array = np.zeros((2, 2))
        self.items: list[Any] = [1, 2]
        self.nested: dict[str, Any] = {"a": {"b": [0, torch.zeros(2)]}}
        self.counts: Counter[str] = Counter()
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)
        self.recent: deque[Any] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.meter = _Meter()
        self.many = list(range(MOST_ENTRIES + 1))
        self.pair = (0, [1])
        self.function: Callable[[], None] = print


def _changed(module: Any) -> None:
    module.number += 2**60 + 1
    module.flag, module.text, module.nothing = True, "b", 1.5
    module.total += 7
    module.total.data = module.total.data  # not a change
    module.vector = (torch.ones(3, requires_grad=True) * 2).square()
    module.half[1] = 0.5
    module.array[0, 1] = 3.0
    module.items[0] += 5
    module.items.append({"x": torch.ones(2, dtype=torch.bool), "y": (1, "z")})
    module.nested["a"]["b"][0] += 1
    module.nested["a"]["b"][1] += 1
    module.nested["new"] = {"deep": [True, None, 1j]}
    module.counts["cat"] += 2
    module.by_name["loss"].append(0.25)
    module.recent.extend([torch.ones(1), 2, 3])
    module.seen.add(4)
    module.meter.update(2.5)
    module.many.append(torch.tensor(1.5))
    module.pair[1].append(2)
    module.of_class["k"] = 1
    module.added = OrderedDict(a=np.arange(3), b=np.float32(2), c=torch.tensor(1 + 2j))
    module.part.calls += 1
    module.unit.calls += 1
    del module.text


def _plain(value: Any) -> Any:
    """Return nested plain data that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, _Meter):
        return _plain(vars(value))
    if isinstance(value, dict):
        return type(value), {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [_plain(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def _values(module: _Module) -> Any:
    foreign = vars(nn.Module()).keys()
    return {
        "root": _plain(attributes_of(module, foreign)),
        "class": _plain(module.of_class),
        "part": module.part.calls,
    }


def _state(module: nn.Module, stages: tuple[int, ...] = (0,)) -> ModuleState:
    unit: Any = module.unit
    return ModuleState(module, nn.Module, [unit], stages, torch.device("cpu"))


@pytest.fixture
def module() -> Any:
    _Module.of_class.clear()
    return _Module()


def test_changes_of_one_stage_are_made_on_another(module: Any) -> None:
    other = copy.deepcopy(module)
    kept = (other.total, other.nested["a"]["b"], other.meter, other.seen)
    states = _state(module), _state(other)
    for state in states:
        state.begin()
    assert states[0].changes() == ([], [])
    other.number += 1  # the code before the call has run there, too
    other.items.append("own")
    _changed(module)
    of_class = dict(module.of_class)
    changes, unsent = states[0].changes()
    assert not unsent
    states[1].apply(changes)
    assert _values(other) == _values(module)
    assert other.unit.calls == 0 and module.of_class == of_class
    assert not other.vector.requires_grad and not hasattr(other, "text")
    # In place where the last stage wrote in place: other code may hold these objects.
    assert kept[0] is other.total and kept[0] == 7
    assert kept[1] is other.nested["a"]["b"] and kept[2] is other.meter and kept[3] is other.seen
    _changed_again = states[0].begin()
    assert states[0].changes() == ([], []) and _changed_again is None


@pytest.mark.parametrize("inference", [False, True])
def test_values_are_restored(module: Any, inference: bool) -> None:
    with torch.inference_mode(inference):
        module.vector = torch.ones(3)  # made in the mode of an evaluation
        state, before = _state(module), copy.deepcopy(_values(module))
        state.begin(undone=True)
        kept = (module.vector, module.items, module.meter, module.recent)
        _changed(module)
        kept[0].zero_()
        state.undo()
    assert _values(module) == before
    assert all(
        a is b
        for a, b in zip(
            kept, (module.vector, module.items, module.meter, module.recent), strict=True
        )
    )


def test_writes_into_inference_tensors_are_found(module: Any) -> None:
    """They have no versions; ``validation_step`` runs in inference mode."""
    with torch.inference_mode():
        module.total = torch.zeros(())
        state = _state(module)
        state.begin()
        assert not state.changes()[0]
        module.total += 1
        [change] = state.changes()[0]
    assert (change.kind, str(change.place)) == ("fill", "self.total")


def test_every_stage_of_a_rank_has_its_own_values(module: Any) -> None:
    """Each runs the code before the call for each micro-batch, in the order of the schedule."""
    state = _state(module, (1, 3))
    state.begin()
    seen = []
    for stage in (1, 1, 3, 1, 3, 3):
        state.enter(stage)
        module.number += 1
        module.vector += 1
        module.items.append(module.number)
        if stage == 3:
            module.meter.update(1.0)
        seen.append((stage, module.number))
    state.end()
    assert seen == [(1, 2), (1, 3), (3, 2), (1, 4), (3, 3), (3, 4)]
    assert module.number == 4 and module.vector.tolist() == [3.0] * 3
    assert module.items == [1, 2, 2, 3, 4] and module.meter.count == 3


def test_what_cannot_be_sent_is_named(module: Any) -> None:
    module.part.settings = SimpleNamespace(inner=SimpleNamespace(rate=1))
    state = _state(module)
    state.begin()
    module.last = SimpleNamespace()
    module.nested["a"]["model"] = nn.Linear(1, 1)
    module.part.settings.inner.rate = 2
    module.part.settings.sparse = torch.zeros(2, 2).to_sparse()
    changes, unsent = state.changes()
    assert sorted(unsent) == [
        "self.last",
        "self.nested['a']['model']",
        "self.part.settings.sparse",
    ]
    assert [str(change.place) for change in changes] == ["self.part.settings.inner.rate"]


def test_many_entries_are_compared_together(module: Any) -> None:
    """Writes into tensors of a long list are found as well."""
    module.items = [torch.zeros(2) for _ in range(100)]
    module.nested = {str(index): float("nan") for index in range(1000)}
    state = _state(module)
    state.begin()
    assert state.changes() == ([], [])
    module.items[7] += 1
    module.items[9] = torch.ones(3)
    module.items.append(torch.ones(1))
    module.nested["5"] = 1.5
    del module.nested["6"]
    module.nested["new"] = 2.0
    found = [(change.kind, str(change.place)) for change in state.changes()[0]]
    assert sorted(found) == [
        ("delete", "self.nested['6']"),
        ("extend", "self.items"),
        ("fill", "self.items[7]"),
        ("set", "self.items[9]"),
        ("set", "self.nested['5']"),
        ("set", "self.nested['new']"),
    ]


def test_replaced_entries_of_large_containers_are_named(module: Any) -> None:
    """They are looked up in some runs, the first among them."""
    module.counts = Counter(dict.fromkeys(range(2 * MOST_ENTRIES), 1))
    module.nested = {index: index for index in range(2 * MOST_ENTRIES)}
    module.many = [torch.zeros(()) for _ in range(MOST_ENTRIES + 1)]
    state, unsent = _state(module), []
    for _ in range(3):
        state.begin()
        module.counts[7] += 1
        module.counts["new"] += 1
        module.nested[-len(module.nested)] = 0
        module.many[9] += 1
        changes, names = state.changes()
        assert len(changes) == 2 - (len(unsent) > 0)  # "new" is an old key from the second run on
        unsent.append(names)
    assert unsent[0] == ["entries of self.counts (8,193)", "entries of self.many (4,097)"]
    assert unsent[1] == []


def test_tensors_that_stay_are_copied_once_in_a_run(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, cloned = _state(module, (1, 3)), []
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        cloned.append(tensor.shape)
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    state.begin()
    at_begin = len(cloned)
    for stage in (1, 3, 1, 3):
        state.enter(stage)
        module.total += 1
    state.end()
    assert at_begin and module.total.item() == 2
    assert set(cloned[at_begin:]) == {module.total.shape}
