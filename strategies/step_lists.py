"""Lists that a step appends to, such as ``self.outputs.append(loss)``: on every stage what the last stage has in them.

The end of an epoch, where such lists are usually put together, runs on all ranks; of a step only the last stage reaches what
comes after the pipelined call.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Path = tuple[Any, ...]


class StepLists:
    """Follows the lists among a module's and its class's attributes, in dicts and lists too, through one step after the other.

    Args:
        module: The LightningModule.
        device: Of this rank.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._foreign = vars(pl.LightningModule()).keys()  # torch's and Lightning's own
        own = [base for base in reversed(type(module).__mro__) if not issubclass(pl.LightningModule, base)]
        self._of_class = {k: v for base in own for k, v in vars(base).items() if isinstance(v, list | Mapping)}
        self._lengths: dict[Path, int] = {}

    def begin(self) -> None:
        """Take note of the lengths before a step."""
        self._lengths = {path: len(found) for path, found in self._lists()}

    def grown(self) -> bytes:
        """Return what the step appended, for :meth:`follow` on the other stages; empty if there is nothing that can be sent."""
        added = {path: found[self._lengths.get(path, 0) :] for path, found in self._lists()}
        added = {path: items for path, items in added.items() if items}
        if not added:
            return b""
        moves = any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(list(added.values())))
        plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), list(added.values()))
        try:
            return pickle.dumps((list(added), plain, moves))
        except (pickle.PicklingError, AttributeError, TypeError):
            return b""  # no stage but the last has it

    def follow(self, grown: bytes) -> None:
        """Append what the last stage appended, in place of what this one did."""
        paths, added, moves = pickle.loads(grown)
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
        """Return the container at ``path``; a list that a dict does not have yet is put there."""
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
    if isinstance(value, list):
        yield path, value
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, Mapping) else ()
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if any(isinstance(item, list | Mapping) for item in islice(inside, 8)):  # a vocabulary is not searched in every step
        for key, item in items:
            yield from _lists_in(item, (*path, key))
