"""Samples of a data-parallel rank, and the position to resume at from a checkpoint.

The user's own sampler (shuffling or not) gives the global order of an epoch. Rank r of D takes
every D-th index from r on. So the order equals the order of a single device, and a position in the
order, counted in samples, is valid for any number of ranks. The state of the random generator
before drawing an epoch's order is kept, so that the order can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from megatron_lightning.data.order.skipped import SkippedSamples
from megatron_lightning.parallel.grid.context import AxisGroup


class _SharedOrder:
    """The order of a sampler with a length, equal on all data-parallel ranks despite different
    random states.
    """

    def __init__(self, order: Iterable[int], group: AxisGroup) -> None:
        self.order = order
        self._group = group

    def draw_states(self) -> dict[str, Tensor]:
        """Return the generators' states of the first rank. A collective."""
        states = {"default": torch.get_rng_state()}
        generator = getattr(self.order, "generator", None)
        if generator is not None:
            states["sampler"] = generator.get_state()
        return self._group.broadcast_object(states)

    def indices(self, states: dict[str, Tensor]) -> Sequence[int]:
        """Draw the order from ``states``. A rank with another generator state keeps the other
        state.
        """
        if isinstance(self.order, SequentialSampler):
            return range(len(self.order))
        state_before = torch.get_rng_state()
        is_shared = torch.equal(state_before, states["default"])
        torch.set_rng_state(states["default"])
        generator = getattr(self.order, "generator", None)
        if "sampler" in states and generator is not None:
            generator.set_state(states["sampler"])
        total = len(self.order)  # type: ignore[arg-type]
        indices = list(islice(self.order, total))  # RandomSampler draws once more at the end
        if not is_shared:
            torch.set_rng_state(state_before)
        return indices


class ResumableSampler(Sampler[int]):
    """Samples of a data-parallel rank from an order, and the position of training in the order.

    Args:
        order: The sampler of the user's DataLoader.
        group: The data-parallel ranks.
        batch_size: Samples of the next batch, over all ranks, as a function of the samples
            consumed.
        drop_last: Drop the last samples if the ranks cannot share them equally. Otherwise the first
            samples are repeated.
        consumed: Samples of all ranks consumed by training before.
        skipped: Samples skipped by training.
    """

    def __init__(
        self,
        order: Iterable[int],
        group: AxisGroup,
        *,
        batch_size: Callable[[int], int],
        drop_last: bool,
        consumed: int = 0,
        skipped: SkippedSamples | None = None,
    ) -> None:
        self.order = order
        self._group = group
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._before = consumed  # samples of the earlier passes
        self._shared = _SharedOrder(order, group)
        self.started = False
        """Whether an index has been requested."""
        self._consumed = 0  # samples of this pass over the data, of all ranks together
        # Of the generators, before this pass's order was drawn.
        self._states: dict[str, Tensor] = {}
        self._resuming = False
        self._skipped = skipped or SkippedSamples()

    def __len__(self) -> int:
        return self._total // self._group.size

    @property
    def _total(self) -> int:
        """Samples of a pass over all ranks, a multiple of the ranks."""
        total, size = len(self.order), self._group.size  # type: ignore[arg-type]
        return (total // size if self._drop_last else -(-total // size)) * size

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch number to a sampler with ``set_epoch``."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def advance(self) -> None:
        """Count a batch on every rank as consumed."""
        end = self._skipped.after(self.consumed_samples, self._batch_size(self.consumed_samples))
        self._consumed = end - self._before

    @property
    def consumed_samples(self) -> int:
        """Samples consumed by all ranks together, in this pass and before."""
        return self._before + self._consumed

    def state_dict(self) -> dict[str, Any]:
        """Return the position, valid for any number of data-parallel ranks and any batch size."""
        return {"consumed": self._consumed, "generator_states": dict(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict` when the sampler is iterated next."""
        self._before = self.consumed_samples - state["consumed"]
        self._consumed = state["consumed"]
        self._states = dict(state["generator_states"])
        # A pass saved before its order was drawn has neither: the order is drawn then.
        self._resuming = bool(self._states) or self._consumed > 0

    def __iter__(self) -> Iterator[int]:
        self.started = True
        if not self._resuming:
            reached = self.consumed_samples
            if self._consumed:  # nothing may be left of the pass but samples to pass over
                reached = min(self._skipped.behind(reached), self._before + self._total)
            self._before = max(reached, self.consumed_samples)
            self._consumed = 0
            self._states = self._shared.draw_states()
        self._resuming = False
        indices, size = self._shared.indices(self._states), self._group.size
        first = self._group.rank
        for positions in self._rest(len(indices)):
            yield from (indices[position] for position in positions[first % size :: size])
            first -= len(positions)

    def _rest(self, num_indices: int) -> Iterator[range]:
        """Yield the positions of the rest of the pass for all ranks together, a multiple of the
        ranks: the last ones are dropped, or the first ones of the pass repeated.
        """

        def left(first: int) -> list[range]:
            ranges = self._skipped.left(self._before + first, self._before + num_indices)
            return [range(r.start - self._before, r.stop - self._before) for r in ranges]

        rest, size = left(self._consumed), self._group.size
        total = sum(map(len, rest))
        count = (total if self._drop_last else total + size - 1) // size * size
        for positions in chain(rest, cycle(left(0))):
            if count <= 0:
                break
            yield positions[:count]
            count -= len(positions)


class ShardedSampler(Sampler[int]):
    """Samples of a data-parallel rank from an order, without a position.

    Args:
        order: The sampler of the user's DataLoader, with a length.
        group: The data-parallel ranks.
        repeat: Whether the first samples are repeated so that all ranks have the same number of
            samples.
    """

    def __init__(self, order: Iterable[int], group: AxisGroup, *, repeat: bool) -> None:
        self._shared = _SharedOrder(order, group)
        self._group = group
        self._repeat = repeat

    def __len__(self) -> int:
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        indices = self._shared.indices(self._shared.draw_states())
        return (indices[position % len(indices)] for position in self._positions())

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch number to a sampler with ``set_epoch``."""
        if hasattr(self._shared.order, "set_epoch"):
            self._shared.order.set_epoch(epoch)

    def _positions(self) -> range:
        total, size = len(self._shared.order), self._group.size  # type: ignore[arg-type]
        return range(self._group.rank, -(-total // size) * size if self._repeat else total, size)
