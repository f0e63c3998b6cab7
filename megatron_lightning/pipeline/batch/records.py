"""Records of the values on a module, to compare with the values after a step and to restore the
values.

Tensors are compared by identity and version, arrays, sets and numbers by value, lists and dicts
entry by entry. In a list or dict of more than ``MOST_ENTRIES`` entries, only added entries are
found in every run. Replaced entries are looked up in a fraction of the runs, so that a run costs no
more than a small list.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lightning.pipeline.batch.plain_values import equal_atoms, is_atom

MOST_ENTRIES = 4096
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MANY = 64
"""Smallest number of entries for comparing tensors in a list or dict together."""
_DEPTH = 4
"""Depth of the search in nested objects."""
_LIBRARIES = frozenset(
    [
        "datasets",
        "lightning",
        "lightning_fabric",
        "logging",
        "megatron_lightning",
        "numpy",
        "pandas",
        "pytorch_lightning",
        "tokenizers",
        "torch",
        "torchmetrics",
        "torchvision",
        "transformers",
    ]
)
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)

MISSING = object()
"""Placeholder of a missing value."""

Record = Any
"""An atom itself, or an object of a class in this module."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A value compared by identity."""

    value: Any

    def is_changed(self, value: Any) -> bool:
        """Return whether another value took the place of the recorded value."""
        return value is not self.value


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor and the tensor's version. An inference tensor has no version and is compared with a
    copy.
    """

    reference: Any
    """The tensor, or a weak reference if the tensor is never restored."""
    version: int
    copy: Tensor | None

    def is_changed(self, value: Any) -> bool:
        """Return whether another value took the tensor's place, or the tensor was written into."""
        if value is not self.tensor or not isinstance(value, Tensor):
            return True
        if value.is_inference():
            return self.copy is None or not torch.equal(value, self.copy)
        return bool(value._version != self.version)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, if still alive."""
        referent: Tensor | None = (
            self.reference if isinstance(self.reference, Tensor) else self.reference()
        )
        return referent


@dataclass(frozen=True, slots=True)
class Copied:
    """An array, a set or a deque, and a copy of the contents."""

    value: Any
    copy: Any

    def is_changed(self, value: Any) -> bool:
        """Return whether another value took the place of the recorded value, or the contents
        differ.
        """
        if value is not self.value:
            return True
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, self.copy, equal_nan=value.dtype.kind in "fc")
        if isinstance(value, deque):
            return len(value) != len(self.copy) or any(
                a is not b for a, b in zip(value, self.copy, strict=True)
            )
        return bool(value != self.copy)


@dataclass(frozen=True, slots=True)
class Items:
    """A list, tuple, dict or object and the records of the entries."""

    container: Any
    entries: dict[Any, Record]
    """Empty for a list or dict that is too large."""
    length: int
    versions: dict[Any, int] | None = None
    """Versions of tensors among the entries, when the entries are the values themselves. None: the
    entries are records."""
    large: Items | None = None
    """The values in a list or dict that is too large, in a run with a look-up."""

    def is_same(self, values: dict[Any, Any]) -> bool:
        """Return whether entries recorded as values are the same, without a loop."""
        if self.versions is None or len(values) != len(self.entries):
            return False
        is_equal = all(map(operator.is_, values.values(), self.entries.values()))
        return (
            is_equal and values.keys() == self.entries.keys() and self.versions == _versions(values)
        )

    def is_replaced(self, values: list[Any] | dict[Any, Any]) -> bool:
        """Return whether entries of a list or dict that is too large were replaced or removed."""
        if self.large is None:
            return False
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        return not self.large.is_same(dict(itertools.islice(pairs, self.length)))

    def entry(self, key: Any) -> Record:
        """Return the record of an entry. ``MISSING`` without a record."""
        record = self.entries.get(key, MISSING)
        if self.versions and isinstance(record, Tensor):
            return KeptTensor(record, self.versions[key], None)
        return record


@dataclass(frozen=True, slots=True)
class Recording:
    """A pass over the values of a module."""

    copies: bool
    """Whether tensors are copied, to allow restoring."""
    run: int = 0
    """Number of the run, which decides whether to look up large lists and dicts."""
    kept: dict[int, KeptTensor] = field(default_factory=dict)
    """Tensors copied by the run, by id. An unchanged tensor is not copied again."""
    seen: set[int] = field(default_factory=set)
    """Ids of containers already recorded, since each container is searched once."""


def attributes_of(value: Any, foreign: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes of an object without code and without the ``foreign`` attributes."""
    attributes = vars(value)
    names = [name for name in attributes if name not in foreign] if foreign else attributes
    return {name: attributes[name] for name in names if not isinstance(attributes[name], _CODE)}


def make_record(value: Any, recording: Recording, depth: int = 0) -> Record:
    """Return the record of a value.

    Args:
        value: The value.
        recording: The pass over the module's values.
        depth: Number of objects around the value.
    """
    if is_atom(value):
        return value
    if isinstance(value, Tensor):  # parameters in lists are left alone
        return _of_tensor(value, recording) if type(value) is Tensor else Kept(value)
    # Cycles, and objects of libraries: identity alone is compared.
    if id(value) in recording.seen or not _is_searched(value, depth):
        return Kept(value)
    recording.seen.add(id(value))
    if isinstance(value, np.ndarray | set | deque):
        return Copied(value, value.copy())
    is_container = isinstance(value, list | tuple | dict)
    items = _entries(value)
    length = len(value) if is_container else len(items)
    kinds = set(map(type, items.values()))
    # Comparing tensors one by one costs a Python call each, in every run. Many tensors are compared
    # by one list of versions.
    together = not recording.copies and len(items) > _MANY and kinds <= {*_PLAIN, Tensor}
    if kinds <= _PLAIN or together:
        large = _of_large(value, recording.run) if length > len(items) else None
        return Items(value, items, length, _versions(items), large)
    # Containers do not count as depth: only objects around objects do.
    inner = depth + (not is_container)
    entries = {key: make_record(item, recording, inner) for key, item in items.items()}
    return Items(value, entries, length)


def _of_large(value: Any, run: int) -> Items | None:
    """Return the values in a large list or dict in a fraction of the runs. None in the other
    runs.
    """
    if isinstance(value, tuple) or run % (len(value) // MOST_ENTRIES + 1):
        return None
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    return Items(value, items, len(items), _versions(items))


def _versions(items: dict[Any, Any]) -> dict[Any, int]:
    """Return the versions of tensors. Empty without tensors."""
    if Tensor not in set(map(type, items.values())):
        return {}
    return {
        key: 0 if item.is_inference() else item._version
        for key, item in items.items()
        if isinstance(item, Tensor)
    }


def _of_tensor(value: Tensor, recording: Recording) -> KeptTensor:
    if value.is_inference():
        copy = value.detach().clone()
        return KeptTensor(value if recording.copies else weakref.ref(value), 0, copy)
    if not recording.copies:
        return KeptTensor(weakref.ref(value), value._version, None)
    earlier_record = recording.kept.get(id(value))
    if earlier_record is None or earlier_record.is_changed(value):
        earlier_record = KeptTensor(value, value._version, value.detach().clone())
        recording.kept[id(value)] = earlier_record
    return earlier_record


def _is_searched(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple | dict | set | deque | np.ndarray):
        return True
    # A class, or an object representing a class, has no dict.
    attributes = getattr(value, "__dict__", None)
    if (
        isinstance(value, (nn.Module, *_CODE))
        or depth >= _DEPTH
        or not isinstance(attributes, dict)
    ):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _entries(value: Any) -> dict[Any, Any]:
    if not isinstance(value, list | tuple | dict):
        return attributes_of(value)
    if len(value) > MOST_ENTRIES:
        return {}
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def tensors_in(record: Record) -> Iterator[Tensor]:
    """Yield the recorded tensors still alive."""
    if isinstance(record, Tensor):
        yield record
    elif isinstance(record, KeptTensor) and record.tensor is not None:
        yield record.tensor
    elif isinstance(record, Copied) and isinstance(record.value, deque):
        yield from (item for item in record.value if isinstance(item, Tensor))
    elif isinstance(record, Items):
        for entry in record.entries.values():
            yield from tensors_in(entry)


def is_changed(before: Record, value: Any) -> bool:
    """Return whether a value differs from the record, other than in the entries of a container."""
    if isinstance(before, Kept | KeptTensor | Copied):
        return before.is_changed(value)
    if isinstance(before, Items) or not is_atom(value) or before is MISSING:
        return True
    return not equal_atoms(before, value)


def is_refilled(before: Record, value: Any) -> bool:
    """Return whether the recorded tensor, array, set or deque is still in place."""
    if isinstance(before, KeptTensor):
        return before.tensor is value
    return isinstance(before, Copied) and before.value is value


def restored(record: Record) -> Any:
    """Return the recorded value. Containers, tensors and objects hold the recorded contents
    again.
    """
    if isinstance(record, KeptTensor):
        return _restored_tensor(record)
    if isinstance(record, Copied):
        refill(record.value, record.copy)
        return record.value
    if isinstance(record, Items):
        _restore_items(record)
        return record.container
    return record.value if isinstance(record, Kept) else record


def _restored_tensor(record: KeptTensor) -> Tensor | None:
    tensor, copy = record.tensor, record.copy
    if tensor is None or copy is None or not record.is_changed(tensor):
        return tensor
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return copy
    refill(tensor, copy)
    return tensor


def refill(value: Any, contents: Any) -> None:
    """Write the contents of a tensor or container into another of the same kind."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(contents)
    elif isinstance(value, np.ndarray):
        np.copyto(value, contents)
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, deque) or value != contents:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(contents)


def _restore_items(record: Items) -> None:
    value, entries = record.container, record.entries
    items = {key: restored(entry) for key, entry in entries.items()}
    is_large = record.length != len(entries)
    if isinstance(value, list):
        value[record.length if is_large else 0 :] = list(items.values())
    elif isinstance(value, dict) and is_large:
        for key in list(value)[record.length :]:
            del value[key]
    elif isinstance(value, dict):
        if value.keys() != items.keys() or any(value[key] is not items[key] for key in items):
            value.clear()
            for key, item in items.items():
                value[key] = item
    elif not isinstance(value, tuple):
        for name in attributes_of(value).keys() - items.keys():
            del vars(value)[name]
        vars(value).update(items)
