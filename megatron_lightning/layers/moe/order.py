"""Bring tokens into the order of their experts, and outputs back into that of the tokens.

Shapes: ``t`` tokens, ``h`` hidden, ``E`` experts, ``n`` rows: one for each token and expert that
computes it. Rows are sorted by expert, and within one by token.

The rows of a token are summed where they lie, always in the order of its experts, so that results
are bit-equal from run to run; adding rows into tokens would be atomic on GPUs, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """The rows that experts compute."""

    tokens: Tensor
    """[n] token of every row."""
    experts: Tensor
    """[n] its expert."""
    counts: Tensor
    """[E] rows of every expert."""
    by_token: Tensor
    """[n] the rows in the order of their tokens."""
    first: Tensor
    """[t] where a token's rows begin in ``by_token``."""

    @classmethod
    def of(cls, chosen: Tensor, num_choices: int | None) -> TokenOrder:
        """Return the rows of ``chosen`` [t, E].

        Args:
            chosen: Which experts compute a token.
            num_choices: How many these are for every token; None: it differs.
        """
        if num_choices is None:
            experts, tokens = chosen.t().nonzero(as_tuple=True)
        else:
            # The number of rows is known, and nothing has to wait for the device. topk returns
            # equal values in any order.
            choices = chosen.to(torch.uint8).topk(num_choices, dim=1).indices.sort(dim=1).values
            experts, places = choices.flatten().sort(stable=True)
            tokens = places // num_choices
        num_rows = chosen.sum(1)
        return cls(
            tokens=tokens,
            experts=experts,
            counts=chosen.sum(0),
            by_token=tokens.argsort(stable=True),
            first=num_rows.cumsum(0) - num_rows,
        )

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
        return F.embedding_bag(order.by_token, rows, order.first, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        order: TokenOrder = ctx.order
        return order.rows(grad), None
