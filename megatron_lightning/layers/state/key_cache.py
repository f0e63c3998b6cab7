"""Cache keys and values of earlier tokens, so that a generating model computes only new tokens.

A step is one ragged row [1, T]: the new tokens of all requests side by side, each with its
position, and padding behind. Only attention separates requests. A *slot* stores the key and the
value of one token in one layer. Slot 0 belongs to no request and receives padding.

Shapes: ``T`` tokens of a step, ``r`` requests, ``k`` tokens with requested logits, ``n`` query
heads, ``g`` key heads, ``d`` size of a query and key head, ``e`` size of a value head, ``L`` keys
of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning import compat
from megatron_lightning.layers.attention.attention_backend import (
    KeyMask,
    attend_masked,
    attend_unfused,
)
from megatron_lightning.layers.state.state_store import StateStore

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # channels of a head, of flash attention
_PAGE_MULTIPLE = 256  # slots of a page, of flash attention 2
_FIRST_CAPABILITY = (8, 0)  # Ampere
Slots = slice | Tensor
"""Slots of a request's keys, in order: neighbors, or [L] numbers."""


class Span(NamedTuple):
    """The tokens of a request in a step."""

    first: int
    """Index of the first token in the row."""
    length: int
    """Number of new tokens."""
    keys: Slots
    """Slots of all keys up to the last new token."""
    num_keys: int
    """Number of these slots."""
    row: int = 0
    """Row of the request's states, in layers that carry a state."""
    num_known: int = 0
    """Number of the request's known tokens, also of later steps. 0: ``num_keys``."""

    @property
    def begins(self) -> bool:
        """Whether the first new token is the first token of the request."""
        return self.num_keys == self.length


class Pages(NamedTuple):
    """The spans of a step in the words of attention kernels over pages and over ragged rows."""

    block_size: int
    """Slots of a page."""
    table: Tensor
    """[r, most pages] int32 pages of each request."""
    num_keys: Tensor
    """[r] int32 keys of each request."""
    rows: compat.RaggedRows
    """New tokens as queries, and ``slots`` as keys."""
    slots: Tensor
    """[all keys] slots of the keys of all requests, one request after the other."""


def takes_pages(device: torch.device) -> bool:
    """Return whether a kernel of the device computes attention of all requests at once. Flash
    attention runs on Ampere and later.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def paged(
    block_size: int, table: Tensor, numbers: Tensor, *, longest: int, most_keys: int, num_slots: int
) -> Pages:
    """Return pages, with slots computed on the device of the table.

    Args:
        block_size: Slots of a page.
        table: [r, most pages] int32 pages of each request.
        numbers: [2, 2 r + 1] int32. First row: new tokens of each request, then their boundaries.
            Second row: the same of keys.
        longest: New tokens of the request with the most.
        most_keys: Keys of the request with the most.
        num_slots: Keys of all requests.
    """
    count = len(table)
    num_keys, ends = numbers[1, :count].contiguous(), numbers[:, count:].contiguous()
    requests = torch.arange(count, device=table.device)
    owners = requests.repeat_interleave(num_keys, output_size=num_slots)
    places = torch.arange(num_slots, device=table.device) - ends[1][owners]
    slots = table[owners, places // block_size].long() * block_size + places % block_size
    rows = compat.RaggedRows(ends[0], ends[1], longest, most_keys)
    return Pages(block_size, table, num_keys, rows, slots)


class AttentionForm(NamedTuple):
    """Visibility of keys and form of the scores in a layer."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Number of earlier positions visible to a query. None: all."""
    in_fp32: bool = False
    """Whether scores and contexts are computed in fp32."""
    softcap: float | None = None
    """Cap of the scores. None: no cap."""
    sink: Tensor | None = None
    """[n] score of a further key of each head, with a value of zeros. None: no such key."""

    @property
    def has_kernel(self) -> bool:
        """Whether torch's kernels compute such scores."""
        return self.softcap is None and self.sink is None


class KeyStore:
    """Keys and values of one layer, with the heads and the dtype of the layer.

    Args:
        num_slots: Number of tokens.
        keys: [T, g, d] keys of the first step.
        values: [T, g, e] values of the first step. None: keys serve as values (latents).
    """

    def __init__(self, num_slots: int, keys: Tensor, values: Tensor | None) -> None:
        self.keys = keys.new_zeros(num_slots, *keys.shape[1:])
        self.values = (
            self.keys if values is None else values.new_zeros(num_slots, *values.shape[1:])
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token."""
        pools = {id(pool): pool for pool in (self.keys, self.values)}
        return sum(pool[0].numel() * pool.element_size() for pool in pools.values())

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Keep keys [T, g, d] and values [T, g, e] in ``slots`` [T]."""
        self.keys.index_copy_(0, slots, keys.to(self.keys.dtype))
        if values is not None:
            self.values.index_copy_(0, slots, values.to(self.values.dtype))

    def copy(self, source: slice, target: slice) -> None:
        """Copy slots to other slots."""
        for pool in {id(pool): pool for pool in (self.keys, self.values)}.values():
            pool[target] = pool[source]

    def read(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return keys [L, g, d] and values [L, g, e] of ``slots``."""
        if isinstance(slots, slice):
            return self.keys[slots], self.values[slots]
        keys = self.keys.index_select(0, slots)
        return keys, keys if self.values is self.keys else self.values.index_select(0, slots)


class KeyCache:
    """Stores of keys and states of a model's layers, made when a layer first computes.

    A store belongs to the cache, not to the layer: copies of a model have none, and memory is free
    when the cache is.

    Args:
        num_slots: Number of tokens, including slot 0.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.stores: dict[nn.Module, KeyStore] = {}
        """Attention module -> store."""
        self._states: dict[nn.Module, StateStore] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token in all layers that have computed on this rank."""
        return sum(store.bytes_per_slot for store in self.stores.values())

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a request's states in all layers that have computed on this rank."""
        return sum(store.bytes_per_row for store in self._states.values())

    def states_of(self, module: nn.Module, empty: Sequence[Tensor]) -> StateStore:
        """Return the states of a module. ``empty``: [1, …] states of a request without tokens."""
        if module not in self._states:
            self._states[module] = StateStore(empty)
        return self._states[module]

    def store(self, module: nn.Module, keys: Tensor, values: Tensor | None) -> KeyStore:
        """Return the store of an attention module for such keys and values."""
        if module not in self.stores:
            self.stores[module] = KeyStore(self.num_slots, keys, values)
        return self.stores[module]


class StepStates:
    """Hidden states of a step, kept for drafting layers."""

    hidden: Tensor | None = None
    """[T, 1, h] behind the final norm, or the rank's shard of the sequence. None: the step has not
    run."""


@dataclass(frozen=True, eq=False)
class CacheStep:
    """Requests of one step, as seen by layers."""

    cache: KeyCache
    """Stores of all layers."""
    slots: Tensor
    """[T] slot of each token."""
    spans: Sequence[Span]
    """The requests, in the order of their tokens."""
    kept: Tensor
    """[k] tokens with requested logits."""
    copies: Sequence[tuple[slice, slice]] = ()
    """Slots to copy to other slots before anything is read."""
    pages: Pages | None = None
    """The spans as pages, for a paged kernel. None: no kernel takes pages."""
    states: StepStates | None = None
    """Receives the hidden states. None: no layer drafts."""
    row_copies: Sequence[tuple[int, int]] = ()
    """Rows of states to copy to other rows before anything is read."""

    def lengths(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the length of each token's request [1, T], with tokens of later steps."""
        lengths = torch.zeros(num_tokens, dtype=torch.int64)
        for span in self.spans:
            lengths[span.first : span.first + span.length] = span.num_known or span.num_keys
        return lengths[None].to(device)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor | None, form: AttentionForm
    ) -> Tensor:
        """Keep the keys and values of new tokens, and return their contexts [T, 1, n, e].

        Args:
            module: The attention module. Each module has a separate store.
            q: [T, 1, n, d] queries.
            k: [T, 1, g, d] keys.
            v: [T, 1, g, e] values. None: keys serve as values.
            form: How queries see keys.
        """
        keys, values = k[:, 0], None if v is None else v[:, 0]
        store = self.cache.store(module, keys, values)
        for source, target in self.copies:
            store.copy(source, target)
        store.write(self.slots, keys, values)
        has_kernel = self.pages is not None and _has_kernel(store, q, form)
        attend = _by_pages if has_kernel else _by_spans
        out = attend(self, store, q[:, 0], form)
        padding = out.new_zeros(len(q) - len(out), *out.shape[1:])
        return torch.cat((out, padding)).unsqueeze(1).to(q.dtype)


def _by_spans(step: CacheStep, store: KeyStore, q: Tensor, form: AttentionForm) -> Tensor:
    """Return contexts of queries [T, n, d], request by request."""
    contexts = []
    for first, count, slots, num_keys, *_ in step.spans:
        hidden = 0  # keys invisible to every query of the span
        if form.window is not None:
            hidden = max(0, num_keys - count - form.window)
        keys, values = store.read(_behind(slots, hidden))
        mask = _mask(count, num_keys - hidden, form.window, q.device)
        contexts.append(_attend_span(q[first : first + count], keys, values, mask, form))
    shape = (0, q.shape[1], store.values.shape[-1])
    return torch.cat(contexts) if contexts else q.new_zeros(shape)


def _attend_span(
    q: Tensor, keys: Tensor, values: Tensor, mask: KeyMask, form: AttentionForm
) -> Tensor:
    """Return contexts [count, n, e] of queries [count, n, d] in a request."""
    dtype = torch.float32 if form.in_fp32 else q.dtype
    inputs = [x.to(dtype).transpose(0, 1)[None] for x in (q, keys, values)]
    with torch.autocast(q.device.type, enabled=False):
        if form.has_kernel:
            out = attend_masked(*inputs, mask=mask, scale=form.scale)
        else:
            softcap, sink = form.softcap, form.sink
            out = attend_unfused(*inputs, mask=mask, scale=form.scale, softcap=softcap, sink=sink)
    return out[0].transpose(0, 1)


def _behind(slots: Slots, num_hidden: int) -> Slots:
    """Return the slots without the first ``num_hidden``."""
    if isinstance(slots, slice):
        return slice(slots.start + num_hidden, slots.stop)
    return slots[num_hidden:]


def _mask(count: int, num_keys: int, window: int | None, device: torch.device) -> KeyMask:
    """Return the mask of ``num_keys`` keys for the last ``count`` positions."""
    narrow = window is not None and num_keys > window + 1
    if count == 1 and not narrow:
        return None
    if count == num_keys and not narrow:
        return "causal"
    keys = torch.arange(num_keys, device=device)
    back = keys[num_keys - count :, None] - keys
    visible = back >= 0
    return visible if window is None else visible & (back <= window)


def _has_kernel(store: KeyStore, q: Tensor, form: AttentionForm) -> bool:
    """Return whether flash attention computes such contexts: half precision, equal heads of keys
    and values, up to 256 channels in multiples of 8, and plain scores.
    """
    size = q.shape[-1]
    return (
        form.has_kernel
        and not form.in_fp32
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == store.keys.dtype == store.values.dtype
        and store.values.shape[-1] == size
        and size <= _LARGEST_HEAD
        and size % _HEAD_MULTIPLE == 0
    )


def _by_pages(step: CacheStep, store: KeyStore, q: Tensor, form: AttentionForm) -> Tensor:
    """Return contexts of queries [T, n, d] by one kernel for all requests. No split of the keys
    depends on other requests.
    """
    pages = step.pages
    if pages is None:
        return _by_spans(step, store, q, form)
    total = step.spans[-1].first + step.spans[-1].length
    # Tokens behind the last request are padding, and belong to no boundary.
    queries = q[:total].contiguous()
    window = -1 if form.window is None else form.window
    if pages.block_size % _PAGE_MULTIPLE == 0 and compat.reads_pages():
        keys, values = (x.unflatten(0, (-1, pages.block_size)) for x in (store.keys, store.values))  # type: ignore[no-untyped-call]
        return compat.attend_pages(
            queries,
            keys,
            values,
            pages.rows,
            table=pages.table,
            num_keys=pages.num_keys,
            scale=form.scale,
            window=window,
        )
    keys, values = store.read(pages.slots)
    return compat.attend_ragged(queries, keys, values, pages.rows, scale=form.scale, window=window)
