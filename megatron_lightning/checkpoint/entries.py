"""Tensors anywhere in a checkpoint's nested state, saved by parameter name, apart from the state.

A callback's averages are an example: ``callbacks -> EMA -> shadows -> model.head.weight``. The
places of the tensors are listed under ``"entries"`` of this package's entries of the checkpoint.
Every rank gets back the shards of the rank's layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.errors import CheckpointError

Path = tuple[Any, ...]

TABLE = "entries"
"""Key of the record among this package's entries of a checkpoint."""


class Entry(NamedTuple):
    """A tensor of a parameter or buffer, and the tensor's place in a checkpoint."""

    stored: str
    """Name of the tensor in the checkpoint. For a tied copy the owner's name."""
    name: str
    """Name of the parameter or buffer. "": the tensor belongs to no parameter, and every rank gets
    the full tensor."""
    path: Path
    """Keys of the path to the tensor, or to the list of the tensor."""
    base: int
    """Number of keys of the path to the container. Further keys spell the name."""
    in_list: bool = False
    """Whether the tensor is in a list with a tensor for each parameter, in order."""


def write_table(checkpoint: dict[str, Any], entries: Iterable[Entry]) -> None:
    """Record the entries in a checkpoint."""
    rows = [(e.stored, e.name, list(e.path), e.base, e.in_list) for e in entries]
    checkpoint[OWN] = {**checkpoint.get(OWN, {}), TABLE: rows}


def read_table(checkpoint: Mapping[str, Any]) -> list[Entry] | None:
    """Return the recorded entries. None: the checkpoint has no record.

    Raises:
        CheckpointError: If the record is malformed.
    """
    rows = (checkpoint.get(OWN) or {}).get(TABLE)
    if rows is None:
        return None
    entries = []
    for row in rows:
        kinds = (str, str, list, int, bool)
        if len(row) != len(kinds) or not all(map(isinstance, row, kinds)) or not row[2]:
            raise CheckpointError(
                f"[{OWN!r}][{TABLE!r}] of the checkpoint has not its form: {row!r}. Use another "
                "checkpoint."
            )
        entries.append(Entry(row[0], row[1], tuple(row[2]), row[3], row[4]))
    return entries


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything in a nested state except containers."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*path, index))
    else:
        yield path, value


def without(value: Any, entries: Sequence[Entry]) -> Any:
    """Return a nested state without the tensors of ``entries``. The emptied containers stay."""
    prefixes = {e.path[:n] for e in entries for n in range(len(e.path) + 1)}
    inner = {e.path[:n] for e in entries for n in range(e.base + 1, len(e.path))}
    tensors = {e.path for e in entries if not e.in_list}
    lists = {e.path for e in entries if e.in_list}

    def copy(value: Any, path: Path) -> Any:
        if path not in prefixes:
            return value
        if path in lists:
            return type(value)()
        if isinstance(value, list | tuple):
            return type(value)([copy(entry, (*path, i)) for i, entry in enumerate(value)])
        if not isinstance(value, Mapping):
            return value
        result: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, entry in value.items():
            place = (*path, key)
            if place not in tensors:
                remaining = copy(entry, place)
                # Levels used only to spell names go with the tensors.
                if place not in inner or remaining != {}:
                    result[key] = remaining
        return result

    return copy(value, ())


def place(checkpoint: dict[str, Any], entries: Iterable[Entry], tensors: Iterable[Tensor]) -> None:
    """Put the tensors of ``entries`` into their places in a checkpoint, in this order."""
    lists: dict[Path, list[Tensor]] = {}
    for entry, tensor in zip(entries, tensors, strict=True):
        if entry.in_list:
            lists.setdefault(entry.path, []).append(tensor)
        else:
            _set(checkpoint, entry.path, tensor)
    for path, values in lists.items():
        _set(checkpoint, path, values)


def _set(value: Any, path: Path, leaf: Any) -> None:
    """Set a leaf of a nested state, and create missing levels of the path."""
    for key in path[:-1]:
        value = value.setdefault(key, {}) if isinstance(value, dict) else value[key]
    if isinstance(leaf, list) and isinstance(value, Mapping) and path[-1] in value:
        leaf = type(value[path[-1]])(leaf)
    value[path[-1]] = leaf
