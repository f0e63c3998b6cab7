"""Loaders that know their position: ``state_dict`` and ``load_state_dict``, or Energon's
``save_state_rank`` and ``restore_state_rank``.

Lightning reads a loader without a length one batch ahead, so that the loader's state is one batch
behind the training step. The state saved here is the state before the batch that was read ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_map

from megatron_lightning.step.loaders.plain_objects import packages_of, packed, unpacked


def saved_loader(loader: Any) -> Any:
    """Return a loader with a state as Lightning saves states, or the loader itself."""
    if isinstance(loader, SavedLoader):
        return loader
    by_rank = _has(loader, "save_state_rank", "restore_state_rank")
    if _has(loader, "state_dict", "load_state_dict"):
        return loader if sized_len(loader) is not None else SavedLoader(loader, by_rank=False)
    return SavedLoader(loader, by_rank=True) if by_rank else loader


def _copy(leaf: Any) -> Any:
    """Return a copy of an array or tensor that a loader may write into."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _has(loader: object, *names: str) -> bool:
    return all(callable(getattr(loader, name, None)) for name in names)


class SavedLoader:
    """A loader with a state as of the batch in the training step.

    Args:
        loader: The user's.
        by_rank: Whether the loader has Energon's protocol.
    """

    def __init__(self, loader: Any, *, by_rank: bool) -> None:
        self._loader = loader
        self._by_rank = by_rank
        self._packages = packages_of(loader)
        self._is_ahead = False
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        batches, self._is_ahead = iter(self._loader), sized_len(self._loader) is None
        while True:
            # Before the batch: the state if the batch is read ahead.
            self._state = self._current() if self._is_ahead else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as plain values.

        Raises:
            CheckpointError: If objects of the state belong to another package's loader.
        """
        return self._state if self._is_ahead else self._current()

    def _current(self) -> dict[str, Any]:
        if self._by_rank:
            return {"rank_state": packed(self._loader.save_state_rank(), self._packages)}
        # A loader may return the dict and the arrays in which it counts on.
        state: dict[str, Any] = tree_map(_copy, self._loader.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this rank.

        Raises:
            CheckpointError: If objects of the state belong to another package's loader.
        """
        if self._by_rank:
            self._loader.restore_state_rank(unpacked(state["rank_state"], self._packages))
        else:
            self._loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
