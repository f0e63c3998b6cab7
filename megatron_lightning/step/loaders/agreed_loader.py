"""DataLoaders without a length. The data-parallel ranks agree on the end.

A rank learns about the end of its data only by reading on. The rank would leave the epoch while
other ranks begin another step, and the collectives of both would mix. After every read, the ranks
therefore tell each other whether a batch came: one all-reduce of a number, also with prefetching.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup


class Agreement:
    """Agreement of the data-parallel ranks on the end of their data.

    Args:
        what: Names the data in a message, such as ``train``.
        ranks: The data-parallel ranks.
        device: This rank's device.
        together: Returns whether the ranks run steps together, so that the data of all ranks must
            end at once. Equal on all ranks.
    """

    def __init__(
        self, what: str, ranks: AxisGroup, device: torch.device, together: Callable[[], bool]
    ) -> None:
        self._what = what
        self._ranks = ranks
        self._together = together
        group = ranks.process_group
        # Numbers on the CPU make no device wait.
        on_cpu = group is None or compat.takes_cpu_tensors(group)
        self._device = torch.device("cpu") if on_cpu else device

    def __deepcopy__(self, memo: object) -> Agreement:
        return self

    def batches(self, own: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batches.

        Raises:
            ConfigError: On all ranks, if the data of only a part of the ranks have ended, before
                the first batch or if ranks run steps together.
        """
        sentinel = object()
        number = 0
        while True:
            batch = next(own, sentinel)
            votes = torch.tensor(int(batch is not sentinel), device=self._device)
            dist.all_reduce(votes, group=self._ranks.process_group)
            if votes == self._ranks.size:
                number += 1
                yield batch
                continue
            # The first batch has collectives of its own, even if later batches have none.
            if votes > 0 and (number == 0 or self._together()):
                self._refuse(number, has_ended=batch is sentinel)
            if batch is not sentinel:
                yield batch
                yield from own  # the other ranks have ended, and do not vote
            return

    def _refuse(self, number: int, *, has_ended: bool) -> None:
        ended = self._ranks.all_gather_object(has_ended)
        ends = [f"{number} batches" if end else "more" for end in ended]
        counts_of_ranks = dict(zip(self._ranks.ranks, ends, strict=True))
        ends = [f"rank {rank}: {text}" for rank, text in list(counts_of_ranks.items())[:8]]
        steps = "every step" if number else "the first step"
        raise ConfigError(
            f"the {self._what} data ended on some ranks only ({', '.join(ends)}), and all of them "
            f"run {steps} together. Let each rank's dataset yield as many batches (cut to the "
            f"shortest, or repeat), or set Trainer(limit_{self._what}_batches={number or 1})."
        )


class _AgreedIterable:
    """Iterable for loaders of a class without subclasses."""

    def __init__(self, loader: Iterable[Any], agreement: Agreement) -> None:
        self._loader = loader
        self._agreement = agreement

    def __iter__(self) -> Iterator[Any]:
        return self._agreement.batches(iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def agreed_loader(loader: Any, agreement: Agreement) -> Any:
    """Return a loader like ``loader``, of the same class for a DataLoader, with an end agreed on by
    all ranks.
    """
    if isinstance(loader, _AgreedIterable) or "agreement" in getattr(loader, "__dict__", {}):
        return loader
    if not isinstance(loader, DataLoader):
        return _AgreedIterable(loader, agreement)
    kind = type(loader)

    def agreed_batches(self: Any) -> Iterator[Any]:
        return agreement.batches(kind.__iter__(self))

    agreed = copy.copy(loader)
    vars(agreed)["agreement"] = agreement
    namespace = {"__iter__": agreed_batches, "__module__": kind.__module__}
    agreed.__class__ = type(kind.__name__, (kind,), namespace)
    return agreed
