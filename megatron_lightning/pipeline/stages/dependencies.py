"""Trace data dependencies between the units of a pipelined module: outputs reaching other units,
and the readers of each parameter.

A forward runs under a dispatch mode that marks the storages of tensors
(https://docs.pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with Modes"):

- the output of unit i is copied to new storage and marked i;
- an operation outside of the units passes the marks of the arguments on to the results;
- tensors made or written inside unit i are marked as a *side channel* of unit i. A side channel
  leaves the unit by the output, a copy, or else by a list, an attribute or a hook;
- a parameter is marked with the parameter's name.

Calls of preludes, with negative indices (``preludes``), are followed like units.

A unit *uses* the marks of the unit's arguments and of all tensors read by operations inside. A
unit's own side channel does not count. The code behind the last unit, the *epilogue*, uses the
tensors returned by the forward.

:class:`CallFacts` collects the findings of all forwards of a kind. :class:`StageCall` is a single
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lightning.pipeline.stages.fields import map_tensors, tensors_inside
from megatron_lightning.pipeline.stages.preludes import PreludeCalls
from megatron_lightning.pipeline.stages.structure import Structure, load
from megatron_lightning.pipeline.stages.unit_values import Left

EPILOGUE = 1_000_000
"""Pseudo-index of the code after the last unit."""
_MOST_CALLS = 1_000_000
_ITEM = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Uses:
    """Uses found in one or several forwards."""

    outputs: frozenset[tuple[int, int]] = frozenset()
    """(j, i): unit i, or the epilogue, uses the output of unit j."""
    side_channels: frozenset[tuple[int, int]] = frozenset()
    """(j, i): unit i, or the epilogue, reads a tensor made or written, but not returned, by unit
    j."""
    parameters: frozenset[tuple[str, int]] = frozenset()
    """(name, i): unit i, or the epilogue, reads a parameter."""
    read_between: frozenset[str] = frozenset()
    """Parameters read by code between the units."""
    writes: frozenset[tuple[int, int]] = frozenset()
    """(j, i): unit i writes into the output of unit j in place."""
    written_between: frozenset[int] = frozenset()
    """Units whose outputs code between the units writes into."""
    aliased: frozenset[tuple[int, int]] = frozenset()
    """(j, i): the output of unit i shares memory with the output of unit j. (i, i): the output
    shares memory with another part of the output, or with an argument."""
    positions: frozenset[tuple[int, int]] = frozenset()
    """(j, n): call j of a prelude comes behind the starts of n units. n = ``EPILOGUE``: inside of a
    unit."""

    @classmethod
    def union(cls, parts: Sequence[Uses]) -> Uses:
        """Return the combined findings of several forwards."""
        return cls(
            frozenset().union(*(part.outputs for part in parts)),
            frozenset().union(*(part.side_channels for part in parts)),
            frozenset().union(*(part.parameters for part in parts)),
            frozenset().union(*(part.read_between for part in parts)),
            frozenset().union(*(part.writes for part in parts)),
            frozenset().union(*(part.written_between for part in parts)),
            frozenset().union(*(part.aliased for part in parts)),
            frozenset().union(*(part.positions for part in parts)),
        )

    def carried(self, end: int) -> tuple[int, ...]:
        """Return the units with outputs received by the stage that begins with unit ``end``: the
        unit before, and earlier units used at ``end`` or behind.
        """
        return tuple(sorted({end - 1} | {j for j, i in self.outputs if j < end <= i}))

    def allows(self, end: int) -> bool:
        """Return whether a stage may begin with unit ``end``: no side channel crosses the
        boundary.
        """
        return not any(j < end <= i for j, i in self.side_channels)


@dataclass(frozen=True)
class _Mark:
    """A side channel of a unit."""

    unit: int


@dataclass(eq=False)
class DependencyTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that follows the marks.

    Args:
        parameters: Name -> parameter of the pipelined module.
    """

    parameters: Mapping[str, Tensor]
    _marks: dict[int, frozenset[Any]] = field(default_factory=dict)
    _alive: list[StorageWeakRef] = field(default_factory=list)
    _inside: list[int] = field(default_factory=list)
    _used: dict[int, set[Any]] = field(default_factory=dict)
    _between: set[Any] = field(default_factory=set)
    _writes: set[tuple[int, int]] = field(default_factory=set)
    _written_between: set[int] = field(default_factory=set)
    _aliased: set[tuple[int, int]] = field(default_factory=set)
    _positions: set[tuple[int, int]] = field(default_factory=set)
    _num_started: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, parameter in self.parameters.items():
            self._mark(parameter, self._of([parameter]) | {name})

    def run_unit(
        self, unit: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit. Return a marked copy of the unit's output."""
        self.begin(unit)
        self._inside.append(unit)
        try:
            inputs = tensors_inside((args, kwargs))
            self._use(self._of(inputs))
            output = run(*args, **kwargs)
            self._find_aliases(unit, inputs, tensors_inside(output))
            # Later writes into the copy belong to this unit, whatever the storage of the output
            # was.
            output = map_tensors(torch.clone, output)
        finally:
            self._inside.pop()
        return self.mark_output(unit, output)

    def _find_aliases(self, unit: int, given: Sequence[Tensor], returned: Sequence[Tensor]) -> None:
        memory = {_storage(tensor): tensor for tensor in given}
        storages: set[int] = set()
        for tensor in returned:
            storage = _storage(tensor)
            if storage in memory:
                marks = self._of([memory[storage]])
                self._aliased |= {(j, unit) for j in (*marks, unit) if isinstance(j, int)}
            if storage in storages:
                self._aliased.add((unit, unit))
            storages.add(storage)

    def begin(self, unit: int) -> None:
        """Record the call of a unit."""
        if unit < 0:
            self._positions.add((unit, EPILOGUE if self._inside else self._num_started))
        else:
            self._num_started = unit + 1

    def use_everywhere(self, unit: int) -> None:
        """Record that any stage may use the output of a unit."""
        self._used.setdefault(EPILOGUE, set()).add(unit)

    def mark_output(self, unit: int, output: Any) -> Any:
        """Mark ``output``, in new storage, as the output of a unit. Return ``output``."""
        for tensor in tensors_inside(output):
            self._mark(tensor, frozenset({unit}))
        return output

    def end(self, output: Any) -> None:
        """Record the output of the forward, and tensors left elsewhere for the step."""
        opaque = [leaf for leaf in tree_leaves(output) if hasattr(leaf, "__dict__")]
        values = [list(vars(leaf).values()) for leaf in opaque if not isinstance(leaf, Tensor)]
        self._used.setdefault(EPILOGUE, set()).update(self._of(tensors_inside([output, values])))

    def keep(self, left: Iterable[Tensor]) -> None:
        """Record the state of preludes among tensors that a stage leaves outside of the output:
        later stages do not have it.
        """
        marks = [mark for mark in self._of(left) if isinstance(mark, _Mark) and mark.unit < 0]
        self._used.setdefault(EPILOGUE, set()).update(marks)

    def uses(self) -> Uses:
        """Return the recorded uses."""
        facts = [(mark, unit) for unit, marks in self._used.items() for mark in marks]
        return Uses(
            frozenset((mark, unit) for mark, unit in facts if isinstance(mark, int)),
            frozenset((mark.unit, unit) for mark, unit in facts if isinstance(mark, _Mark)),
            frozenset((mark, unit) for mark, unit in facts if isinstance(mark, str)),
            frozenset(mark for mark in self._between if isinstance(mark, str)),
            frozenset(self._writes),
            frozenset(self._written_between),
            frozenset(self._aliased),
            frozenset(self._positions),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        inputs = tensors_inside((args, kwargs))
        marks = self._of(inputs)
        self._use(marks)
        if func is _ITEM and not self._inside:  # a Python number may reach anything
            self._used.setdefault(EPILOGUE, set()).update(j for j in marks if isinstance(j, int))
        output = func(*args, **(kwargs or {}))
        if not self._inside and func._schema.is_mutable:
            written_sources = self._of(tensors_inside(output))
            self._written_between |= {j for j in written_sources if isinstance(j, int)}
        sources: set[int] = set()
        if self._inside:
            marks = frozenset({_Mark(self._inside[-1])})
            if not func._schema.is_mutable:  # a view of an argument is not made here
                sources = {_storage(tensor) for tensor in inputs}
        if marks:
            for tensor in tensors_inside(output):
                if _storage(tensor) not in sources:
                    tensor_sources = self._of([tensor])
                    if self._inside and func._schema.is_mutable:
                        unit = self._inside[-1]
                        self._writes |= {(j, unit) for j in tensor_sources if isinstance(j, int)}
                    self._mark(tensor, marks | tensor_sources)
        return output

    def _use(self, marks: frozenset[Any]) -> None:
        if self._inside:
            unit = self._inside[-1]
            self._used.setdefault(unit, set()).update(marks - {_Mark(unit)})
        else:
            self._between |= marks

    def _of(self, tensors: Iterable[Tensor]) -> frozenset[Any]:
        none: frozenset[Any] = frozenset()
        return none.union(*(self._marks.get(_storage(tensor), none) for tensor in tensors))

    def _mark(self, tensor: Tensor, marks: frozenset[Any]) -> None:
        # While the reference lives, the address belongs to this storage alone.
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._alive.append(reference)
        self._marks[_storage(tensor)] = marks


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@dataclass
class CallFacts:
    """Facts about a kind of call of the pipelined module: hook, mode, kinds of arguments."""

    uses: Uses | None = None
    """Uses of outputs by units. None: not known, and every output is carried."""
    written: set[int] = field(default_factory=set)
    """Units whose outputs the model's code writes into, so that the code receives copies."""
    left: set[Left] = field(default_factory=set)
    """Attributes that units set on themselves in the forward."""
    draws_on_host: bool = False
    """Whether the forward draws from Python's or NumPy's generators."""
    tested: set[int] = field(default_factory=set)
    """Stages of this rank with results already checked for the NaN of placeholders."""
    notes: dict[tuple[int, Hashable], tuple[str, dict[int, Structure]]] = field(
        default_factory=dict
    )
    """Structures of the outputs of the units before the end of a stage, by stage and signature."""
    received: dict[str, dict[int, Structure]] = field(default_factory=dict)
    """Structures by the received notes."""

    def carried(self, end: int) -> Sequence[int]:
        """Return the units and the possible calls of preludes with outputs in the message to the
        stage that begins with unit ``end``.
        """
        if end == 0:
            return ()
        return range(-_MOST_CALLS, end) if self.uses is None else self.uses.carried(end)

    def structures(self, note: str) -> dict[int, Structure]:
        """Return the structures in a note."""
        if note not in self.received:
            self.received[note] = load(note)
        return self.received[note]


@dataclass
class StageCall:
    """A forward of a stage on a micro-batch."""

    stage: int
    first: int
    end: int
    carried: Collection[int]
    """Units with outputs received by the next stage. Empty on the last stage."""
    received: Mapping[int, tuple[Tensor, ...]]
    """Received tensors of units before the stage."""
    structures: dict[int, Structure]
    """Structures of the outputs of the units before the end of the stage."""
    note: str | None
    """The structures for the next stage. None: the stage's own units have not run with this
    signature."""
    was_called_before: bool
    """Whether the step on the stage before has called the module."""
    seed: int
    """Seed of the forward between units, equal on all stages. A unit adds a number of its own, from
    1 on."""
    preludes: PreludeCalls
    """Calls of preludes so far."""
    sent: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Tensors of units for the next stage."""
    sent_at_entry: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Tensors of preludes that the step has called before the module."""
    borrowed: list[tuple[int, Tensor, int]] = field(default_factory=list)
    """Unit, tensor and version of outputs borrowed by the model's code, which may not write into
    the outputs."""
    next: int = 0
    """Index of the next called unit."""
    records: bool = False
    """Whether the forward is recorded for a backward."""
    entered: bool = False
    """Whether the step has called the module, or a unit."""
