"""Tensors of a step: a ragged row with the tokens of all requests, and the slots of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.assembly.stage_runner import StageCall
from megatron_lightning.inference.batch import Batch, Portion
from megatron_lightning.inference.cache import Allocator, Pages
from megatron_lightning.inference.routes import RouteRecorder
from megatron_lightning.layers import key_cache
from megatron_lightning.layers.key_cache import CacheStep, KeyCache, Span, StepStates
from megatron_lightning.parallel.context import ParallelContext


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
        slots, spans = [], []
        # All requests' tokens lie in one row, without padding between: spans say which tokens
        # belong together.
        for portion in batch.portions:
            request, first, end = portion.request, portion.first, portion.end
            start = len(tokens)
            tokens += request.tokens[request.offset + first : request.offset + end]
            tokens += portion.drafts
            positions += range(first, end)
            kept_places += [start + place - first for place in portion.kept]
            slots.append(self._allocator.slots(request, first, end))
            state_row = self._allocator.row(request)
            spans.append(Span(start, portion.count, self._keys(portion), end, state_row))
        # Padded to few different lengths, and to equal shards: every length is a signature of
        # messages.
        padding = _padded(len(tokens), self._multiple, self._device) - len(tokens)
        pages = self._pages(batch, spans)
        step = CacheStep(
            self._cache,
            self._on_device(torch.cat([*slots, torch.zeros(padding, dtype=torch.int64)])),
            tuple(spans),
            self._on_device(torch.tensor(kept_places or [0])),
            batch.copies,
            pages,
            StepStates() if self._keeps_states else None,
        )
        row = self._on_device(torch.tensor([tokens + [0] * padding]))
        places = self._on_device(torch.tensor([positions + [0] * padding]))
        inputs = {"position_ids": places, "cache": step}
        if self._recorder is not None:
            inputs["routes"] = self._recorder.begin(batch)
        return StageCall((row,), inputs, row.shape[1])

    def _keys(self, portion: Portion) -> key_cache.Slots:
        keys = self._allocator.keys(portion.request, portion.end)
        return keys if isinstance(keys, slice) else self._on_device(keys)

    def _on_device(self, x: Tensor) -> Tensor:
        return x.to(self._device, non_blocking=True)

    def _pages(self, batch: Batch, spans: list[Span]) -> key_cache.Pages | None:
        """Return the spans as pages, for the kernel of GPUs. None: attention reads slots."""
        if self._device.type != "cuda" or not isinstance(self._allocator, Pages) or not spans:
            return None
        tables = [
            torch.tensor(self._allocator.pages(portion.request), dtype=torch.int32)
            for portion in batch.portions
        ]
        ends = [0, *(span.first + span.length for span in spans)]
        return key_cache.Pages(
            self._allocator.block_size,
            self._on_device(torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)),
            self._on_device(torch.tensor([span.num_keys for span in spans], dtype=torch.int32)),
            self._on_device(torch.tensor(ends, dtype=torch.int32)),
            max(span.length for span in spans),
        )


def _padded(length: int, multiple: int, device: torch.device) -> int:
    """Return the length of a row: a multiple of the number of ranks sharing the row.

    On a CPU products of 2 and 3 rows take longer than of 4.
    """
    if device.type == "cpu" and length in (2, 3):
        length = 4
    return max(1, -(-length // multiple)) * multiple
