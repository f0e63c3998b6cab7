"""Which samples a data-parallel rank sees, and where it continues after a checkpoint.

The user's own sampler (shuffling or not) gives the global order of an epoch; rank r of D takes every D-th index from r on.
So the order is that of a single device, and a position in it, counted in samples, is valid for any number of ranks. The
state of the random generator in which an epoch's order was drawn is kept, so that it can be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from megatron_lightning.parallel.context import AxisGroup


class DataProgress:
    """Where training is in the data: one integer, and how the current epoch's order was drawn."""

    def __init__(self) -> None:
        self.consumed_samples = 0
        """Samples that all data-parallel ranks together have trained on."""
        self.epoch_start = 0
        """``consumed_samples`` when the current epoch's order was drawn."""
        self.generator_states: dict[str, Tensor] = {}
        """States of the generators right before the current epoch's order was drawn."""
        self.resuming = False
        """Whether the next pass over the data continues the epoch that a checkpoint was saved in."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "consumed_samples": self.consumed_samples,
            "epoch_start": self.epoch_start,
            "generator_states": dict(self.generator_states),
        }

    def load_state_dict(self, state: dict[str, Any], *, epoch_finished: bool) -> None:
        """Continue from :meth:`state_dict` at the next pass over the data, which is a new epoch if the saved one was finished."""
        self.consumed_samples, self.epoch_start = state["consumed_samples"], state["epoch_start"]
        self.generator_states = dict(state["generator_states"])
        self.resuming = not epoch_finished and self.consumed_samples > self.epoch_start


class ResumableSampler(Sampler[int]):
    """One data-parallel rank's part of the order that ``order`` gives, from the position that ``progress`` says.

    Args:
        order: The sampler of the user's DataLoader.
        group: The data-parallel ranks.
        progress: Position in the data, read when the first index is asked for.
        drop_last: Leave out the samples that do not fill all ranks; otherwise the first ones are repeated for them.
    """

    def __init__(self, order: Iterable[int], group: AxisGroup, progress: DataProgress, *, drop_last: bool) -> None:
        self.order, self._group, self._progress, self._drop_last = order, group, progress, drop_last
        self.started = False
        """Whether an index has been asked for since the last call of ``__iter__`` on a fresh position."""

    def __len__(self) -> int:
        total, size = len(self.order), self._group.size  # type: ignore[arg-type]
        return total // size if self._drop_last else -(-total // size)

    def set_epoch(self, epoch: int) -> None:
        """Forward Lightning's epoch number to a sampler that wants it."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        progress, size = self._progress, self._group.size
        self.started = True
        if progress.resuming:
            progress.resuming = False
        else:
            progress.epoch_start = progress.consumed_samples
            progress.generator_states = self._draw_states()
        skip = progress.consumed_samples - progress.epoch_start
        yield from islice(self._evened(self._ordered(progress.generator_states)), skip + self._group.rank, None, size)

    def _evened(self, indices: list[int]) -> list[int]:
        size = self._group.size
        if self._drop_last:
            return indices[: len(indices) // size * size]
        missing = -len(indices) % size
        while missing and indices:
            indices = indices + indices[:missing]
            missing = -len(indices) % size
        return indices

    def _draw_states(self) -> dict[str, Tensor]:
        """Return the generators' states, the same on all data-parallel ranks."""
        states = {"default": torch.get_rng_state()}
        if self._own_generator() is not None:
            states["sampler"] = self._own_generator().get_state()
        if self._group.process_group is not None:
            box: list[Any] = [states if self._group.rank == 0 else None]
            dist.broadcast_object_list(box, src=self._group.ranks[0], group=self._group.process_group)
            states = box[0]
        return states

    def _ordered(self, states: dict[str, Tensor]) -> list[int]:
        """Draw the order from ``states``; a rank whose generator was elsewhere keeps its own state."""
        before = torch.get_rng_state()
        shared = torch.equal(before, states["default"])
        torch.set_rng_state(states["default"])
        if "sampler" in states and self._own_generator() is not None:
            self._own_generator().set_state(states["sampler"])
        indices = list(self.order)
        if not shared:
            torch.set_rng_state(before)
        return indices

    def _own_generator(self) -> Any:
        return getattr(self.order, "generator", None)


def resumable(loader: DataLoader[Any], group: AxisGroup, progress: DataProgress) -> DataLoader[Any]:
    """Return a training DataLoader like ``loader`` with a :class:`ResumableSampler`.

    A loader over an iterable dataset, with a custom batch sampler or with a DistributedSampler of the user's is returned as
    it is: it shards and resumes itself.
    """
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, ResumableSampler | DistributedSampler):
        return loader
    if not hasattr(loader.sampler, "__len__"):
        return loader
    sampler = ResumableSampler(loader.sampler, group, progress, drop_last=bool(loader.drop_last))
    return _update_dataloader(loader, sampler)


def sharded_for_evaluation(loader: DataLoader[Any], group: AxisGroup, stage: RunningStage) -> DataLoader[Any]:
    """Return a validation, test or predict DataLoader that shows each data-parallel rank its share, as Lightning's DDP does.

    For validation and test the first samples are repeated if the ranks cannot have equal shares; predictions never repeat.
    """
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler) or group.size == 1:
        return loader
    share: dict[str, Any] = {"num_replicas": group.size, "rank": group.rank, "shuffle": False}
    sampler: Sampler[int]
    if stage == RunningStage.PREDICTING:
        sampler = UnrepeatedDistributedSamplerWrapper(loader.sampler, **share)
    elif isinstance(loader.sampler, RandomSampler | SequentialSampler):
        sampler = DistributedSampler(loader.dataset, **share)
    else:
        sampler = DistributedSamplerWrapper(loader.sampler, **share)
    return _update_dataloader(loader, sampler, mode=stage)
