"""Style of a module of stacked experts that has a router of its own, as in ``transformers`` 5.

Shapes: ``t`` tokens of this rank, ``h`` hidden, ``k`` experts of a token, ``E`` experts, ``n`` rows
(a token that one expert computes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.moe.dispatch import AllToAllDispatch, Exchange
from megatron_lightning.layers.moe.router import Routing
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan, take_shards
from megatron_lightning.parallel.spec import ShardSpec

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class DispatchedExperts:
    """A module of experts that is called with tokens [t, h], the indices [t, k] of each token's
    experts and their weights [t, k], and returns weighted sums [t, h].

    Weights: every parameter is [E, ...], experts over ``ep``. Input: this rank's tokens, sent to
    the ranks of their experts; there the module's own forward computes each row by one expert of
    weight 1. Output: the weighted sums of this rank's tokens.
    """

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Take this rank's experts, and exchange tokens around the forward."""
        _check_stacked(module)
        if context.tp.size > 1 or context.etp.size > 1:
            raise ShardingError(
                f"tensor_model_parallel_size is {context.tp.size} and expert_tensor_parallel_size "
                f"{context.etp.size}, and style DispatchedExperts divides experts over "
                "expert_model_parallel_size only. Set both to 1, or leave "
                "expert_model_parallel_size and the sharding plan out: the model's own plan then "
                "splits every expert over the tensor-parallel ranks."
            )
        num_experts, ep = int(module.num_experts), context.ep  # type: ignore[arg-type]
        if num_experts % ep.size:
            raise ShardingError(
                f"{num_experts} experts are not divisible by expert_model_parallel_size={ep.size}. "
                "Set it to a divisor of the experts."
            )
        specs = {
            name: ShardSpec.split(tuple(p.shape), dim=0, size=ep.size, rank=ep.rank, axis="ep")
            for name, p in module.named_parameters()
        }
        if ep.size == 1:
            module.shard_specs = specs  # type: ignore[assignment]
            return module
        take_shards(module, module, specs)
        module.num_experts = num_experts // ep.size  # type: ignore[assignment]
        exchange = _ExchangeTokens(AllToAllDispatch(context.axis("etp-ep")), num_experts)
        module.register_forward_pre_hook(exchange.send, with_kwargs=True)
        module.register_forward_hook(exchange.receive)
        return module


def _check_stacked(module: nn.Module) -> None:
    """Check that ``module`` has experts in the first dim of every parameter."""
    num_experts, shapes = getattr(module, "num_experts", None), {}
    for name, parameter in module.named_parameters():
        shapes[name] = tuple(parameter.shape)
    if not shapes or any("." in n or s[:1] != (num_experts,) for n, s in shapes.items()):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:3])
        raise ShardingError(
            "style DispatchedExperts takes a module with num_experts and stacked weights, "
            f"[num_experts, ...], and the plan points it at a {type(module).__name__} with "
            f"num_experts={num_experts} and {found or 'no parameters'}. Where each expert is a "
            "module (transformers before 5, or code of the model's repository), install a newer "
            "transformers and load its own class; else correct the pattern."
        )


class _ExchangeTokens:
    """Hooks around one module; they belong to the same call."""

    def __init__(self, dispatcher: AllToAllDispatch, num_experts: int) -> None:
        self._dispatcher = dispatcher
        self._num_experts = num_experts
        self._exchange: Exchange | None = None
        self._num_rows = 0

    def send(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Replace the arguments by the rows of this rank's experts, one choice of weight 1 each."""
        hidden, index, weights = (*args, *(kwargs[name] for name in _ARGUMENTS[len(args) :]))
        exchange = self._dispatcher.begin(self._routing(index, weights), index.shape[1])
        rows, counts = exchange.dispatch(hidden)
        self._exchange, self._num_rows = exchange, len(rows)
        experts = torch.arange(len(counts), device=rows.device)
        experts = experts.repeat_interleave(counts, output_size=len(rows))[:, None]
        if not len(rows):
            # Without any, the forward may not use the weights, and backward would not come here:
            # it exchanges tokens on all ranks.
            rows, experts = F.pad(rows, (0, 0, 0, 1)), F.pad(experts, (0, 0, 0, 1))
        return (rows, experts, torch.ones_like(experts, dtype=weights.dtype)), {}

    def receive(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the weighted sums of this rank's tokens."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            raise RuntimeError("the experts have returned without having been called")
        return exchange.combine(output[: self._num_rows])

    def _routing(self, index: Tensor, weights: Tensor) -> Routing:
        probs = weights.new_zeros(len(index), self._num_experts).scatter(1, index, weights)
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, index, True)
        return Routing(probs, chosen, chosen.sum(0), index.new_zeros(()), losses=())
