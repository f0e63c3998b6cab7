"""Tensors of a step: a ragged row with the tokens of all requests, and the slots of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.assembly.stage_runner import StageCall
from megatron_lightning.inference.engine.expert_routes import RouteRecorder
from megatron_lightning.inference.engine.keys.key_slots import Allocator, Pages
from megatron_lightning.inference.engine.request_batch import Batch
from megatron_lightning.layers.state import key_cache
from megatron_lightning.layers.state.key_cache import (
    CacheStep,
    KeyCache,
    Span,
    StepStates,
    takes_pages,
)
from megatron_lightning.parallel.grid.context import ParallelContext


class Steps:
    """Makes the model's call of a batch.

    Args:
        cache: The stores of the layers.
        allocator: The slots of the requests.
        context: Groups of this rank.
        recorder: Records the experts of tokens. None: routes are not recorded.
        keeps_states: Whether hidden states are kept for drafts.
    """

    def __init__(
        self,
        cache: KeyCache,
        allocator: Allocator,
        context: ParallelContext,
        recorder: RouteRecorder | None = None,
        *,
        keeps_states: bool = False,
    ) -> None:
        self._cache = cache
        self._allocator = allocator
        self._device = context.device
        self._recorder = recorder
        self._keeps_states = keeps_states
        self._multiple = context.tp.size if context.sp else 1

    def padding(self) -> StageCall:
        """Return a call without requests, for the sake of other ranks."""
        return self.call(Batch())

    def call(self, batch: Batch) -> StageCall:
        """Return the model's call for a batch."""
        tokens: list[int] = []
        positions: list[int] = []
        kept_places: list[int] = []
        paged = self._pages(batch)
        keys = self._keys(batch, paged)
        slots, spans = [], []
        # All requests' tokens lie in one row, without padding between: spans say which tokens
        # belong together.
        for portion, own_keys in zip(batch.portions, keys, strict=True):
            request, first, end = portion.request, portion.first, portion.end
            start = len(tokens)
            tokens += request.tokens[request.offset + first : request.offset + end]
            tokens += portion.drafts
            positions += range(first, end)
            kept_places += [start + place - first for place in portion.kept]
            if paged is None or isinstance(own_keys, slice):
                slots.append(self._allocator.slots(request, first, end))
            else:
                slots.append(own_keys[first:])
            state_row = self._allocator.row(request)
            num_known = max(end, request.num_inputs)
            spans.append(Span(start, portion.count, own_keys, end, state_row, num_known))
        # Padded to few different lengths, and to equal shards: every length is a signature of
        # messages.
        padding = _padded(len(tokens), self._multiple, self._device) - len(tokens)
        unused = torch.zeros(
            padding, dtype=torch.int64, device=None if paged is None else self._device
        )
        step = CacheStep(
            self._cache,
            self._on_device(torch.cat([*slots, unused])),
            tuple(spans),
            self._on_device(torch.tensor(kept_places or [0])),
            batch.copies.slots,
            paged,
            StepStates() if self._keeps_states else None,
            batch.copies.rows,
        )
        row = self._on_device(torch.tensor([tokens + [0] * padding]))
        places = self._on_device(torch.tensor([positions + [0] * padding]))
        inputs = {"position_ids": places, "cache": step}
        if self._recorder is not None:
            inputs["routes"] = self._recorder.begin(batch)
        return StageCall((row,), inputs, row.shape[1])

    def _keys(self, batch: Batch, paged: key_cache.Pages | None) -> Sequence[key_cache.Slots]:
        """Return the slots of each request's keys."""
        portions = batch.portions
        if paged is not None:
            return torch.split(paged.slots, [portion.end for portion in portions])
        keys = [self._allocator.keys(portion.request, portion.end) for portion in portions]
        return [own if isinstance(own, slice) else self._on_device(own) for own in keys]

    def _on_device(self, x: Tensor) -> Tensor:
        return x.to(self._device, non_blocking=True)

    def _pages(self, batch: Batch) -> key_cache.Pages | None:
        """Return the requests as pages, for the kernel of GPUs. None: attention reads slots."""
        allocator, portions = self._allocator, batch.portions
        if not (takes_pages(self._device) and isinstance(allocator, Pages) and portions):
            return None
        tables = [torch.tensor(allocator.pages(p.request), dtype=torch.int32) for p in portions]
        numbers = torch.tensor(
            [[portion.count, portion.end] for portion in portions], dtype=torch.int32
        ).T
        ends = torch.nn.functional.pad(numbers.cumsum(1, dtype=torch.int32), (1, 0))
        return key_cache.paged(
            allocator.block_size,
            self._on_device(torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)),
            self._on_device(torch.cat((numbers, ends), 1)),
            longest=max(portion.count for portion in portions),
            most_keys=max(portion.end for portion in portions),
            num_slots=sum(portion.end for portion in portions),
        )


def _padded(length: int, multiple: int, device: torch.device) -> int:
    """Return the length of a row: a multiple of the number of ranks sharing the row.

    On a CPU products of 2 and 3 rows take longer than of 4.
    """
    if device.type == "cpu" and length in (2, 3):
        length = 4
    return max(1, -(-length // multiple)) * multiple
