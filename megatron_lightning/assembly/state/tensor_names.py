"""Tensors of a module's parameters and buffers in a nested state, found by the tensors' keys.

Keys spell a name after any prefix (``module.``): with dots, with ``_`` or ``-`` or nothing in place
of dots, or as nested levels. Keys may also spell the names inside of a sub-module. A list with as
many tensors as the module has parameters, or trainable parameters, is in the order of the
parameters. Shapes must equal the parameters' shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_lightning.checkpoint.entries import Entry, Path
from megatron_lightning.parallel.shards.spec import Shape

_SEPARATORS = re.compile(r"[._\-/]")
Found = tuple[Entry, Tensor]


class TensorNames:
    """Names of a module's parameters and buffers, to be found in a state.

    Args:
        shapes: Name -> shape of the tensor in the state.
        owners: Name of a tied copy -> name of the owner.
        orders: Names in lists of tensors.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        owners: Mapping[str, str],
        orders: Sequence[Sequence[str]] = (),
    ) -> None:
        self._shapes = shapes
        self._owners = owners
        self._orders = [order for order in orders if order]
        self._spelled: dict[str, list[str]] = {}
        for name in shapes:
            self._spelled.setdefault(_letters(name), []).append(name)

    def find(self, state: Mapping[str, Any]) -> list[Found]:
        """Return the tensors of a nested state that belong to the module, each with an entry."""
        return list(self._find(state, ()))

    def _find(self, value: Any, path: Path) -> Iterator[Found]:
        if isinstance(value, Mapping):
            other_entries = {}
            for key, entry in value.items():
                if not isinstance(entry, Tensor):
                    yield from self._find(entry, (*path, key))
                elif named_entries := self._named((*path, key), entry):
                    yield named_entries, entry
                else:
                    other_entries[key] = entry
            yield from self._inside(other_entries, path)
        elif isinstance(value, list | tuple):
            names = self._ordered(value)
            stored = ".".join(map(str, path))
            for name, entry in zip(names, value, strict=False):
                yield Entry(f"{stored}.{self._owner(name)}", name, path, len(path), True), entry
            if not names:
                for index, entry in enumerate(value):
                    yield from self._find(entry, (*path, index))

    def spelled(self, path: Path) -> Iterator[tuple[int, str, list[str]]]:
        """Yield the module's names spelled by the end of a path, longest first.

        Yields:
            Number of keys before the name, the prefix in the first key, and names.
        """
        pieces = [
            (index, text, start)
            for index, text in enumerate(map(str, path))
            for start in (0, *(m.end() for m in _SEPARATORS.finditer(text)))
        ]
        texts = [str(key) for key in path]
        for index, text, start in pieces:
            names = self._spelled.get(_letters("".join((text[start:], *texts[index + 1 :]))))
            if names:
                yield index, text[:start].rstrip("._-/"), names

    def _named(self, path: Path, tensor: Tensor) -> Entry | None:
        shape = tuple(tensor.shape)
        for base, prefix, names in self.spelled(path):
            fitting = [name for name in names if self._shapes[name] == shape]
            exact = [name for name in fitting if str(path[-1]).endswith(name)]
            if len(fitting) == 1 or len(exact) == 1:
                name = (exact or fitting)[0]
                names_before = [*map(str, path[:base]), *([prefix] if prefix else [])]
                return Entry(".".join((*names_before, self._owner(name))), name, path, base)
        return None

    def _inside(self, tensors: Mapping[Any, Tensor], path: Path) -> Iterator[Found]:
        """Find the tensors of a dict named after a sub-module, after at most a single prefix."""
        tensors_of_keys = {
            str(key): (key, tensor) for key, tensor in tensors.items() if tensor.dim()
        }
        if not tensors_of_keys:
            return
        for skipped in (0, 1):
            matches = {
                text: self._matches("".join(_SEPARATORS.split(text)[skipped:]), tensor)
                for text, (_, tensor) in tensors_of_keys.items()
            }
            paths = set.intersection(*(set(match) for match in matches.values()))
            if len(paths) == 1:
                module = paths.pop()
                for text, (key, tensor) in tensors_of_keys.items():
                    name = matches[text][module]
                    stored = ".".join((*map(str, path), self._owner(name)))
                    yield Entry(stored, name, (*path, key), len(path)), tensor
                return

    def _matches(self, letters: str, tensor: Tensor) -> dict[str, str]:
        """Return path of a sub-module -> name, for names inside of the sub-module spelled by
        ``letters``.
        """
        shape = tuple(tensor.shape)
        return {
            module: name
            for module, name in self._inner.get(letters, ())
            if self._shapes[name] == shape
        }

    @cached_property
    def _inner(self) -> dict[str, list[tuple[str, str]]]:
        """Letters of a name inside of a sub-module -> (path of the sub-module, full name)."""
        matches: dict[str, list[tuple[str, str]]] = {}
        for name in self._shapes:
            for dot in (match.start() for match in re.finditer(r"\.", name)):
                matches.setdefault(_letters(name[dot + 1 :]), []).append((name[:dot], name))
        return matches

    def _ordered(self, values: Sequence[Any]) -> Sequence[str]:
        """Return the names of a list's tensors. (): not a list of parameters."""
        if all(isinstance(value, Tensor) for value in values):
            for names in self._orders:
                if [tuple(v.shape) for v in values] == [self._shapes[name] for name in names]:
                    return names
        return ()

    def _owner(self, name: str) -> str:
        return self._owners.get(name, name)


def _letters(name: str) -> str:
    return _SEPARATORS.sub("", name)
