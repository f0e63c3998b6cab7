"""States of layers that carry a state along the sequence, kept while text is generated.

A request has a row in the store of each layer, from its first token to its end. A state cannot be
rolled back: a request whose first tokens are computed again begins with empty states. Requests with
the same first tokens copy the states behind the last common token.

Shapes: ``T`` tokens of a step, ``r`` requests with equally many tokens, ``l`` tokens of each, ``w``
channels of the inputs, ``d`` channels of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron_lightning.layers.state.key_cache import CacheStep, Span

Mix = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
"""Maps inputs [l, r, w] and the states [r, …] before them to outputs [l, r, d] and the states
behind."""


class StateStore:
    """States of one layer.

    Args:
        empty: [1, …] states of a request without tokens.
    """

    def __init__(self, empty: Sequence[Tensor]) -> None:
        self._empty = list(empty)
        self._pools = [state.clone() for state in empty]

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a request."""
        return sum(state.numel() * state.element_size() for state in self._empty)

    def read(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return the states [r, …] before the new tokens of requests."""
        self._grow(max(span.row for span in spans) + 1)
        device = self._empty[0].device
        rows = torch.tensor([span.row for span in spans], device=device)
        begins = torch.tensor([span.begins for span in spans], device=device)
        return [
            torch.where(begins.view(-1, *[1] * (pool.dim() - 1)), empty, pool[rows])
            for pool, empty in zip(self._pools, self._empty, strict=True)
        ]

    def write(self, spans: Sequence[Span], states: Sequence[Tensor]) -> None:
        """Keep the states [r, …] behind the new tokens of requests."""
        rows = torch.tensor([span.row for span in spans], device=self._empty[0].device)
        for pool, state in zip(self._pools, states, strict=True):
            pool.index_copy_(0, rows, state.to(pool.dtype))

    def copy(self, source: int, target: int) -> None:
        """Copy the states of a row to another row."""
        self._grow(max(source, target) + 1)
        for pool in self._pools:
            pool[target] = pool[source]

    def _grow(self, num_rows: int) -> None:
        """Make room for ``num_rows`` rows."""
        for index, pool in enumerate(self._pools):
            num_missing = num_rows - len(pool)
            if num_missing > 0:
                self._pools[index] = torch.cat([pool, pool.new_zeros(num_missing, *pool.shape[1:])])


def mix_requests(
    step: CacheStep, module: nn.Module, inputs: Tensor, empty: Sequence[Tensor], mix: Mix
) -> Tensor:
    """Mix the new tokens of each request with the request's state. Requests with equally many new
    tokens are mixed at once.

    Args:
        step: The requests.
        module: The mixer. Each mixer has a separate store.
        inputs: [T, 1, w] tokens of all requests, and padding.
        empty: [1, …] states of a request without tokens.
        mix: Computes outputs and states.

    Returns:
        [T, 1, d] outputs, zero for padding.
    """
    store = step.cache.states_of(module, empty)
    for source, target in step.row_copies:
        store.copy(source, target)
    # Requests of equal length are one batch for the mixer. In decoding, all requests have one
    # token.
    groups: dict[int, list[Span]] = {}
    for span in step.spans:
        groups.setdefault(span.length, []).append(span)
    if not groups:  # ranks may have collectives in common
        out, _ = mix(inputs, list(empty))
        return torch.zeros_like(out)
    outputs, places = [], []
    for length, spans in groups.items():
        place = torch.tensor([[span.first + i for span in spans] for i in range(length)])
        place = place.to(inputs.device)
        out, states = mix(inputs[place, 0], store.read(spans))
        store.write(spans, states)
        outputs.append(out.flatten(0, 1))
        places.append(place.flatten())
    mixed = torch.cat(outputs)
    rows = mixed.new_zeros(len(inputs), mixed.shape[-1])
    return rows.index_copy(0, torch.cat(places), mixed).unsqueeze(1)
