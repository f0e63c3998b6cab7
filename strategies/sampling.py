"""Which samples a data-parallel rank sees, and where it continues after a checkpoint.

The user's own sampler (shuffling or not) gives the global order of an epoch; rank r of D takes every D-th index from r on.
So the order is that of a single device, and a position in it, counted in samples, is valid for any number of ranks. The
state of the random generator in which an epoch's order was drawn is kept, so that it can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from megatron_lightning.data.batch_size import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.strategies.lightning_internals import unwrapped_batch_sampler, with_sampler


class _SharedOrder:
    """The order that a sampler draws, the same on all data-parallel ranks though their random states differ.

    Args:
        order: A sampler with a length.
        group: The data-parallel ranks.
    """

    def __init__(self, order: Iterable[int], group: AxisGroup) -> None:
        self.order, self._group = order, group

    def draw_states(self) -> dict[str, Tensor]:
        """Return the generators' states of the first rank; a collective."""
        states = {"default": torch.get_rng_state()}
        if self._own_generator() is not None:
            states["sampler"] = self._own_generator().get_state()
        return self._group.broadcast_object(states)

    def indices(self, states: dict[str, Tensor]) -> Sequence[int]:
        """Draw the order from ``states``; a rank whose generator stood elsewhere keeps its own state."""
        if isinstance(self.order, SequentialSampler):
            return range(len(self.order))
        before = torch.get_rng_state()
        shared = torch.equal(before, states["default"])
        torch.set_rng_state(states["default"])
        if "sampler" in states and self._own_generator() is not None:
            self._own_generator().set_state(states["sampler"])
        total = len(self.order)  # type: ignore[arg-type]
        indices = list(islice(self.order, total))  # not to its end, where RandomSampler draws once more
        if not shared:
            torch.set_rng_state(before)
        return indices

    def _own_generator(self) -> Any:
        return getattr(self.order, "generator", None)


class ResumableSampler(Sampler[int]):
    """One data-parallel rank's part of the order that ``order`` gives, and how far training is in it.

    Args:
        order: The sampler of the user's DataLoader.
        group: The data-parallel ranks.
        batch_size: Samples of the next batch, over all ranks, as a function of the samples consumed.
        drop_last: Leave out the samples that do not fill all ranks; otherwise the first ones are repeated for them.
        consumed: Samples of all ranks that training has consumed before.
    """

    def __init__(
        self,
        order: Iterable[int],
        group: AxisGroup,
        *,
        batch_size: Callable[[int], int],
        drop_last: bool,
        consumed: int = 0,
    ) -> None:
        self.order, self._group, self._batch_size, self._drop_last = order, group, batch_size, drop_last
        self._before = consumed  # samples of the passes before this one
        self._shared = _SharedOrder(order, group)
        self.started = False
        """Whether an index has been asked for."""
        self._consumed = 0  # samples of this pass over the data, of all ranks together
        self._states: dict[str, Tensor] = {}  # of the generators, right before this pass's order was drawn
        self._resuming = False
        self._last_batch = 0

    def __len__(self) -> int:
        total, size = len(self.order), self._group.size  # type: ignore[arg-type]
        return total // size if self._drop_last else -(-total // size)

    def set_epoch(self, epoch: int) -> None:
        """Forward Lightning's epoch number to a sampler that wants it."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def advance(self) -> None:
        """Count one batch on every rank as consumed."""
        self._last_batch = self._batch_size(self.consumed_samples)
        self._consumed += self._last_batch

    def go_back(self) -> None:
        """Take back the last :meth:`advance`; the batch comes again when the pass is resumed."""
        self._consumed, self._last_batch = self._consumed - self._last_batch, 0

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have consumed, in this pass and before."""
        return self._before + self._consumed

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: valid for any number of data-parallel ranks and any batch size."""
        return {"consumed": self._consumed, "generator_states": dict(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` the next time that the sampler is iterated."""
        total, self._consumed = self.consumed_samples, state["consumed"]
        self._before, self._states = total - self._consumed, dict(state["generator_states"])
        self._resuming = True

    def __iter__(self) -> Iterator[int]:
        self.started = True
        if not self._resuming:
            self._before, self._consumed = self.consumed_samples, 0
            self._states = self._shared.draw_states()
        self._resuming = False
        indices, size = self._shared.indices(self._states), self._group.size
        for position in range(self._consumed + self._group.rank, len(self) * size, size):
            yield indices[position % len(indices)]


class OrderShare(Sampler[int]):
    """One data-parallel rank's part of an order that is not simply that of the dataset, or whose position nobody needs.

    Args:
        order: The sampler of the user's DataLoader, with a length.
        group: The data-parallel ranks.
        repeat: Whether the first samples are repeated so that all ranks have equally many.
    """

    def __init__(self, order: Iterable[int], group: AxisGroup, *, repeat: bool) -> None:
        self._shared, self._group, self._repeat = _SharedOrder(order, group), group, repeat

    def __len__(self) -> int:
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        indices = self._shared.indices(self._shared.draw_states())
        return (indices[position % len(indices)] for position in self._positions())

    def set_epoch(self, epoch: int) -> None:
        """Forward Lightning's epoch number to a sampler that wants it."""
        if hasattr(self._shared.order, "set_epoch"):
            self._shared.order.set_epoch(epoch)

    def _positions(self) -> range:
        total, size = len(self._shared.order), self._group.size  # type: ignore[arg-type]
        return range(self._group.rank, -(-total // size) * size if self._repeat else total, size)


def resumable(
    loader: DataLoader[Any], group: AxisGroup, *, consumed: int = 0, micro_batch_size: int | None = None
) -> DataLoader[Any]:
    """Return a training DataLoader like ``loader`` with a :class:`ResumableSampler`.

    A loader over an iterable dataset or with a DistributedSampler of the user's own is returned as it is: it shards and resumes
    itself. One with a class of batch sampler of the user's own is shared out, and does not resume; with one data-parallel rank
    it, too, is returned as it is, as is one with a sampler without length. Batches may be a :class:`ScheduledBatchSampler`.

    Args:
        loader: The user's.
        group: The data-parallel ranks.
        consumed: Samples of all ranks that training has consumed so far.
        micro_batch_size: Samples of a micro-batch.

    Raises:
        ConfigError: If the samples cannot be shared out among several data-parallel ranks.
    """
    if type(loader.batch_sampler) is ScheduledBatchSampler:
        return _scheduled(loader, loader.batch_sampler, group, consumed, micro_batch_size or 1)
    custom_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    order = getattr(loader.batch_sampler, "sampler", loader.sampler) if custom_batches else _order(loader)
    if isinstance(loader.dataset, IterableDataset) or isinstance(order, ResumableSampler | DistributedSampler):
        return loader
    if group.size > 1:
        _check_length(order, group, RunningStage.TRAINING)
    if custom_batches and group.size > 1:
        return _with_sampler(loader, OrderShare(order, group, repeat=True))
    if custom_batches or not hasattr(order, "__len__"):
        return loader
    given = _given_batches(loader)
    batch_size, drop_last = (given.batch_size, given.drop_last) if given else (loader.batch_size or 1, bool(loader.drop_last))
    constant = BatchSizeSchedule(global_batch_size=batch_size * group.size)
    running = partial(constant.running_batch_size, unit=1)
    sampler = ResumableSampler(_order(loader), group, batch_size=running, drop_last=drop_last, consumed=consumed)
    return _with_sampler(loader, sampler)


def _scheduled(
    loader: DataLoader[Any], batches: ScheduledBatchSampler, group: AxisGroup, consumed: int, micro_batch_size: int
) -> DataLoader[Any]:
    schedule, unit = batches.schedule, micro_batch_size * group.size
    sampler = ResumableSampler(
        batches.sampler,
        group,
        batch_size=partial(schedule.running_batch_size, unit=unit),
        drop_last=batches.drop_last,
        consumed=consumed,
    )
    shared = ScheduledBatchSampler(
        sampler, schedule, drop_last=batches.drop_last, num_replicas=group.size, micro_batch_size=micro_batch_size
    )
    return with_sampler(loader, sampler, batch_sampler=shared)


def sampler_of(loader: object) -> ResumableSampler | None:
    """Return the sampler that :func:`resumable` has put into a DataLoader, if it has."""
    candidates = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return next((sampler for sampler in candidates if isinstance(sampler, ResumableSampler)), None)


def _given_batches(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return the plain BatchSampler that the user made the DataLoader with; the loader itself then knows no batch size."""
    batches = loader.batch_sampler
    return batches if type(batches) is BatchSampler and loader.batch_size is None else None


def _order(loader: DataLoader[Any]) -> Iterable[int]:
    """Return the user's sampler; beside a given BatchSampler, torch puts a sequential one that nobody asks."""
    given = _given_batches(loader)
    return given.sampler if given else loader.sampler


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[int], mode: RunningStage | None = None) -> DataLoader[Any]:
    """Return a DataLoader like ``loader`` that reads in another order."""
    given = _given_batches(loader)
    if given is None:
        return with_sampler(loader, sampler, mode)
    return with_sampler(loader, sampler, mode, batch_size=given.batch_size, drop_last=given.drop_last)


def sharded_for_evaluation(loader: DataLoader[Any], group: AxisGroup, stage: RunningStage) -> DataLoader[Any]:
    """Return a validation, test or predict DataLoader that shows each data-parallel rank its share, as Lightning's DDP does.

    For validation and test the first samples are repeated if the ranks cannot have equal shares; predictions never repeat.
    """
    if isinstance(loader.dataset, IterableDataset) or isinstance(_order(loader), DistributedSampler) or group.size == 1:
        return loader
    share: dict[str, Any] = {"num_replicas": group.size, "rank": group.rank, "shuffle": False}
    _check_length(_order(loader), group, stage)
    if stage == RunningStage.PREDICTING:
        return _sharded_for_prediction(loader, group, share)
    order = _order(loader)
    if isinstance(order, SequentialSampler):
        return _with_sampler(loader, DistributedSampler(loader.dataset, **share), stage)
    return _with_sampler(loader, OrderShare(order, group, repeat=True), stage)


def _check_length(order: Iterable[int], group: AxisGroup, stage: RunningStage) -> None:
    if not hasattr(order, "__len__"):
        raise ConfigError(
            f"the {stage.value} DataLoader has a {type(order).__name__} without __len__, which cannot be shared out among "
            f"{group.size} data-parallel ranks. Give it a length, or share the samples out yourself and set "
            "Trainer(use_distributed_sampler=False)."
        )


def _sharded_for_prediction(loader: DataLoader[Any], group: AxisGroup, share: dict[str, Any]) -> DataLoader[Any]:
    """Put the share inside the batch sampler: Lightning has wrapped that already, to note the indices of every batch."""

    def shared(order: Iterable[int]) -> Sampler[int]:
        if isinstance(order, SequentialSampler):
            return UnrepeatedDistributedSamplerWrapper(order, **share)
        return OrderShare(order, group, repeat=False)

    batches = unwrapped_batch_sampler(loader)
    if batches is None:
        return with_sampler(loader, shared(loader.sampler))
    if isinstance(getattr(batches, "sampler", None), Sampler) and not isinstance(batches.sampler, DistributedSampler):
        batches.sampler = shared(batches.sampler)
    return loader
