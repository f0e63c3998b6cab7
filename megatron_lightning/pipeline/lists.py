"""Synchronize lists that a step appends to, such as ``self.outputs.append(loss)``, from the last
stage to all stages.

The end of an epoch, where such lists are usually read, runs on all ranks; in a step only the last
stage reaches the code after the pipelined call.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Path = tuple[Any, ...]


class ListSync:
    """Synchronization of the lists among a module's and its class's attributes, in dicts and lists
    too.

    Args:
        module: The user's module.
        base: The library's class that it extends, whose attributes are not the user's.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, base: type[nn.Module], device: torch.device) -> None:
        self._module = module
        self._device = device
        self._foreign = vars(base()).keys()
        own = [kind for kind in reversed(type(module).__mro__) if not issubclass(base, kind)]
        self._of_class = {
            k: v for kind in own for k, v in vars(kind).items() if isinstance(v, list | Mapping)
        }
        self._lengths: dict[Path, int] = {}

    def begin(self) -> None:
        """Record the lengths before a step."""
        self._lengths = {path: len(found) for path, found in self._lists()}

    def appended(self) -> bytes:
        """Return the items that the step appended, for :meth:`append` on other stages; empty if
        none can be sent.
        """
        added = {path: found[self._lengths.get(path, 0) :] for path, found in self._lists()}
        added = {path: items for path, items in added.items() if items}
        if not added:
            return b""
        moves = any(
            isinstance(leaf, Tensor) and leaf.device.type != "cpu"
            for leaf in tree_leaves(list(added.values()))
        )
        plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), list(added.values()))
        try:
            return pickle.dumps((list(added), plain, moves))
        except (pickle.PicklingError, AttributeError, TypeError):
            return b""  # no stage but the last has it

    def append(self, appended: bytes) -> None:
        """Append the items of the last stage, in place of this stage's own."""
        paths, added, moves = pickle.loads(appended)
        if moves:
            added = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), added)
        for path, items in zip(paths, added, strict=True):
            found = self._at(path)
            if isinstance(found, list):
                found[self._lengths.get(path, 0) :] = items

    def _lists(self) -> Iterator[tuple[Path, list[Any]]]:
        for name, value in {**self._of_class, **vars(self._module)}.items():
            if name not in self._foreign:
                yield from _lists_in(value, (name,))

    def _at(self, path: Path) -> Any:
        """Return the container at ``path``; a list that is missing in a dict is created."""
        name, *keys = path
        container: Any = getattr(self._module, name, None)
        for key in keys:
            if isinstance(container, dict):
                container = container.setdefault(key, [])
            elif isinstance(container, list) and key < len(container):
                container = container[key]
            else:
                return None
        return container


def _lists_in(value: Any, path: Path) -> Iterator[tuple[Path, list[Any]]]:
    items: Iterable[tuple[Any, Any]] = ()
    inside: Iterable[Any] = ()
    if isinstance(value, list):
        yield path, value
        items, inside = enumerate(value), value
    elif isinstance(value, Mapping):
        items, inside = value.items(), value.values()
    # A vocabulary is not searched in every step.
    if any(isinstance(item, list | Mapping) for item in islice(inside, 8)):
        for key, item in items:
            yield from _lists_in(item, (*path, key))
