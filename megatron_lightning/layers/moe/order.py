"""Bring tokens into the order of their experts, and outputs back into that of the tokens.

Shapes: ``t`` tokens, ``h`` hidden, ``E`` experts, ``n`` rows: one for each token and expert that
computes it. Rows are sorted by expert, and within one by token.

Both directions copy rows to or from *slots*: [t, w] places, of which a token has one for each of
its rows. Sums over a token's rows are sums over its slots, always in the same order, so that
results are bit-equal from run to run; adding rows into tokens would be atomic on GPUs, in any
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """The rows that experts compute."""

    tokens: Tensor
    """[n] token of every row."""
    experts: Tensor
    """[n] its expert."""
    slots: Tensor
    """[n] its place in the [t, w] slots; the one behind them for a row that no sum needs."""
    counts: Tensor
    """[E] rows of every expert."""
    num_tokens: int
    """t."""
    width: int
    """w."""
    is_full: bool
    """Whether there is a row for every slot, and a slot for every row."""

    @classmethod
    def of(cls, chosen: Tensor, probs: Tensor, num_choices: int | None) -> TokenOrder:
        """Return the rows of ``chosen`` [t, E].

        Args:
            chosen: Which experts compute a token.
            probs: [t, E] weights of their outputs.
            num_choices: How many these are for every token; None: it differs.
        """
        num_tokens, counts = len(chosen), chosen.sum(0)
        if num_choices is None:
            experts, tokens = chosen.t().nonzero(as_tuple=True)
            # Rows of weight 0, which fill experts up to their capacity, have no slots.
            counted = chosen & (probs != 0)
            width = int(counted.sum(1).max()) if num_tokens else 0
            slots = tokens * width + (counted.cumsum(1) - 1)[tokens, experts]
            slots = slots.where(counted[tokens, experts], num_tokens * width)
            return cls(tokens, experts, slots, counts, num_tokens, width, is_full=False)
        # The number of rows is known, and nothing has to wait for the device. topk returns
        # equal values in any order.
        choices = chosen.to(torch.uint8).topk(num_choices, dim=1).indices.sort(dim=1).values
        experts, slots = choices.flatten().sort(stable=True)
        tokens = slots // num_choices
        return cls(tokens, experts, slots, counts, num_tokens, num_choices, is_full=True)

    def rows(self, x: Tensor) -> Tensor:
        """Map tokens [t, h] to rows [n, h]."""
        rows: Tensor = _Rows.apply(x, self)  # type: ignore[no-untyped-call]
        return rows

    def sums(self, rows: Tensor) -> Tensor:
        """Map rows [n, h] to the sum of every token's [t, h]."""
        sums: Tensor = _Sums.apply(rows, self)  # type: ignore[no-untyped-call]
        return sums

    def weights(self, probs: Tensor) -> Tensor:
        """Map weights [t, E] to those of the rows [n, 1]."""
        return probs[self.tokens, self.experts][:, None]


class _Rows(torch.autograd.Function):
    """Copies tokens to their rows forward, sums a token's rows backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        order: TokenOrder = ctx.order
        return order.sums(grad), None


class _Sums(torch.autograd.Function):
    """Sums a token's rows forward, copies tokens to their rows backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        num_slots, h = order.num_tokens * order.width, rows.shape[1]
        # Every slot of a full order is written; others have one more, which no sum reads.
        slots = rows.new_empty(num_slots, h) if order.is_full else rows.new_zeros(num_slots + 1, h)
        slots = slots.index_copy_(0, order.slots, rows)[:num_slots]
        return slots.view(order.num_tokens, order.width, h).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        order: TokenOrder = ctx.order
        rows = order.rows(grad)
        if order.is_full:
            return rows, None
        unused = order.slots == order.num_tokens * order.width
        return rows.masked_fill(unused[:, None], 0.0), None
