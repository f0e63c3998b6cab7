"""Bring tokens to the ranks of their experts, and the outputs back.

Shapes: ``t`` tokens of this rank, ``h`` hidden, ``E`` experts, ``L`` = E / ep experts of a rank,
``n`` rows (a token for one expert), ``G`` = ep x etp ranks of the group. Each ``etp`` neighbors
hold shards of the same experts.

An exchange has three steps, so that a layer can do other work while the row counts travel:

    exchange = dispatcher.begin(order)        row counts are in flight
    x, counts = exchange.dispatch(tokens)     [n, h] sorted rows of this rank's experts, [L]
    y = exchange.combine(experts(x, counts))  [t, h] sums over a token's experts

All dispatchers give the same result. They differ in communication:

    LocalDispatch      nothing: all experts are here
    AllToAllDispatch   rows to the ranks of their experts and back: twice n h in forward
    AllGatherDispatch  all tokens to all ranks, and sums back: t h (G - 1) each way

With etp above 1 a row goes to all ranks with a shard of the row's expert, and the partial outputs
are summed at the source rank: as many bytes as an all-to-all over ep and a gather over etp.

Rows are sorted by expert, then by token. The rows of a token are summed in place, always in the
order of the token's experts, so that results are bit-equal between runs. Adding rows into tokens
would be atomic on GPUs, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.moe.router import Routing
from megatron_lightning.parallel.collectives import all_reduce, gather_sequence, reduce_scatter
from megatron_lightning.parallel.grid.context import AxisGroup


@dataclass(frozen=True)
class TokenOrder:
    """The rows to compute by experts."""

    tokens: Tensor
    """[n] token of every row."""
    experts: Tensor
    """[n] expert of every row."""
    counts: Tensor
    """[E] rows of every expert."""
    by_token: Tensor
    """[n] the rows in the order of their tokens."""
    first: Tensor
    """[t] first row of each token in ``by_token``."""

    @classmethod
    def of(cls, chosen: Tensor, num_choices: int | None) -> TokenOrder:
        """Return the rows of ``chosen`` [t, E].

        Args:
            chosen: Whether an expert computes a token.
            num_choices: Number of experts of every token. None: the number varies.
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
        """Map weights [t, E] to the weights of the rows [n, 1]."""
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


class Exchange(Protocol):
    """One exchange of tokens."""

    def dispatch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens [t, h] to the rows of this rank's experts [n, h], and their numbers [L]."""
        ...

    def combine(self, outputs: Tensor) -> Tensor:
        """Map outputs [n, h] of this rank's experts to weighted sums of the tokens' [t, h]."""
        ...


class Dispatcher(Protocol):
    """Exchanges tokens among the ranks of the experts."""

    def begin(self, routing: Routing, num_choices: int | None) -> Exchange:
        """Begin an exchange. ``num_choices``: experts of every token, None if the number varies."""
        ...


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Multiply in fp32 at least, and no wider than needed."""
    sum_dtype = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.to(sum_dtype) * weights.to(sum_dtype)


class LocalDispatch:
    """Dispatch with all experts on this rank."""

    def begin(self, routing: Routing, num_choices: int | None) -> Exchange:
        """See :class:`Dispatcher`."""
        order = TokenOrder.of(routing.chosen, num_choices)
        return _LocalExchange(order, routing.probs)


class _LocalExchange:
    def __init__(self, order: TokenOrder, probs: Tensor) -> None:
        self._order = order
        self._probs = probs

    def dispatch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._order.rows(tokens), self._order.counts

    def combine(self, outputs: Tensor) -> Tensor:
        rows = _weighted(outputs, self._order.weights(self._probs))
        return self._order.sums(rows).to(outputs.dtype)


class _RankDispatch:
    """Dispatch over ranks.

    Args:
        group: The ranks over etp and ep, etp fastest.
        num_parts: Ranks that share an expert (etp).
    """

    def __init__(self, group: AxisGroup, num_parts: int = 1) -> None:
        self.group = group
        self.num_parts = num_parts


# --------------------------------------------------------------------------------------- all-to-all


class AllToAllDispatch(_RankDispatch):
    """Dispatch that sends every row to the ranks of the row's expert."""

    def begin(self, routing: Routing, num_choices: int | None) -> Exchange:
        """See :class:`Dispatcher`. A collective."""
        order = TokenOrder.of(routing.chosen, num_choices)
        return _AllToAllExchange(order, routing.probs, self.group, self.num_parts)


class _AllToAllExchange:
    def __init__(self, order: TokenOrder, probs: Tensor, group: AxisGroup, num_parts: int) -> None:
        self._order = order
        self._probs = probs
        self._group = group
        self._parts = num_parts
        # [G, L]: number of rows that this rank sends to, and gets from, every other rank, for each
        # expert.
        owners = order.counts.view(group.size // num_parts, 1, -1)
        self._sent = owners.expand(-1, num_parts, -1).reshape(group.size, -1).contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(
            self._received, self._sent, group=group.process_group, async_op=True
        )

    def dispatch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self._work.wait()
        totals = torch.stack([self._sent.sum(1), self._received.sum(1)]).tolist()  # waits, once
        self._sizes: list[int] = totals[0]
        self._incoming: list[int] = totals[1]
        rows = self._order.rows(tokens)
        if self._parts > 1:
            rows = torch.cat([part for part in self._blocks(rows) for _ in range(self._parts)])
        arrived = _exchange(rows, self._sizes, self._incoming, self._group)
        # Rows come by rank and, from each, by expert.
        expert_ids = torch.arange(self._received.shape[1], device=tokens.device)
        experts = expert_ids.repeat(self._group.size).repeat_interleave(
            self._received.flatten(), output_size=len(arrived)
        )
        self._by_expert = experts.argsort(stable=True)
        return _permuted(arrived, self._by_expert), self._received.sum(0)

    def combine(self, outputs: Tensor) -> Tensor:
        inverse = torch.empty_like(self._by_expert)
        inverse[self._by_expert] = torch.arange(len(inverse), device=inverse.device)
        arrived = _permuted(outputs, inverse)
        rows = _exchange(arrived, self._incoming, self._sizes, self._group)
        if self._parts > 1:
            blocks = torch.split(rows, self._sizes)
            sums = (
                torch.stack(blocks[first : first + self._parts]).sum(0)
                for first in range(0, len(blocks), self._parts)
            )
            rows = torch.cat(list(sums))
        weighted = _weighted(rows, self._order.weights(self._probs))
        return self._order.sums(weighted).to(outputs.dtype)

    def _blocks(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows for the ranks of each place on the ep axis."""
        return torch.split(rows, self._sizes[:: self._parts])


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: AxisGroup) -> Tensor:
    result: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def _permuted(rows: Tensor, order: Tensor) -> Tensor:
    result: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: AxisGroup
    ) -> Tensor:
        ctx.arguments = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group.process_group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _exchange(grad, *ctx.arguments), None, None, None


class _Permute(torch.autograd.Function):
    """``rows[order]`` of a permutation. Backward writes every row once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


# --------------------------------------------------------------------------------------- all-gather


class AllGatherDispatch(_RankDispatch):
    """Dispatch that gives all tokens to all ranks. Each rank computes the tokens of its experts."""

    def begin(self, routing: Routing, num_choices: int | None) -> Exchange:
        """See :class:`Dispatcher`. A collective."""
        places = self.group.size // self.num_parts
        experts = slice(*_range(routing.chosen.shape[1], places, self.group.rank // self.num_parts))
        # Ranks with fewer tokens send padding tokens without an expert.
        num_tokens = torch.tensor(len(routing.chosen), device=routing.chosen.device)
        padded = int(all_reduce(num_tokens, self.group, "max"))
        chosen = _padded(routing.chosen.to(torch.uint8), padded)
        chosen = gather_sequence(chosen, self.group).bool()[:, experts]
        probs = gather_sequence(_padded(routing.probs, padded), self.group)[:, experts]
        return _AllGatherExchange(TokenOrder.of(chosen, None), probs, self.group)


def _padded(x: Tensor, length: int) -> Tensor:
    return x if len(x) == length else F.pad(x, (0, 0, 0, length - len(x)))


def _range(size: int, num_parts: int, part: int) -> tuple[int, int]:
    share = size // num_parts
    return part * share, (part + 1) * share


class _AllGatherExchange:
    def __init__(self, order: TokenOrder, probs: Tensor, group: AxisGroup) -> None:
        self._local = _LocalExchange(order, probs)
        self._order = order
        self._group = group

    def dispatch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self._num_tokens = len(tokens)
        padded = len(self._order.first) // self._group.size
        return self._local.dispatch(gather_sequence(_padded(tokens, padded), self._group))

    def combine(self, outputs: Tensor) -> Tensor:
        sums = reduce_scatter(self._local.combine(outputs), self._group)
        return sums[: self._num_tokens]


DISPATCHERS: Mapping[str, type[AllToAllDispatch | AllGatherDispatch]] = {
    "alltoall": AllToAllDispatch,
    "allgather": AllGatherDispatch,
}
"""Dispatchers over ranks, by Megatron-Core's names."""
