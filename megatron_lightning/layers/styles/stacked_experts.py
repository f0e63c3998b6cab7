"""Style of a module of stacked experts with a separate router, as in ``transformers`` 5.

Shapes: ``t`` tokens of this rank, ``h`` hidden, ``k`` experts of a token, ``E`` experts, ``n`` rows
(a token for one expert).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.moe.dispatch import AllToAllDispatch, Exchange
from megatron_lightning.layers.moe.router import Routing
from megatron_lightning.layers.styles.adapters import roles_of
from megatron_lightning.parallel.collectives import gather, scatter
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.attachments import attachment_of
from megatron_lightning.parallel.shards.sharding import ShardingPlan, take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec


@dataclass(frozen=True)
class DispatchedExperts:
    """A module of experts, called with tokens [t, h], expert indices [t, k] and expert weights [t,
    k]. The module returns weighted sums [t, h].

    Weights: every parameter is [E, ...], with experts over ``ep``. Input: this rank's tokens, sent
    to the ranks of their experts. On the receiving rank the module's forward computes each row by
    one expert of weight 1. Tensor-parallel ranks divide replicated tokens among themselves. Output:
    the weighted sums of the tokens.
    """

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layout divides the experts of a full module.

        Raises:
            ShardingError: If the module has no stacked experts, the experts do not divide, or each
                expert would be split.
        """
        _check_stacked(module)
        num_experts = int(module.num_experts)  # type: ignore[arg-type]
        if layout.etp > 1:
            raise ShardingError(
                f"expert_tensor_parallel_size is {layout.etp}, by default that of "
                f"tensor_model_parallel_size ({layout.tp}), and style DispatchedExperts divides "
                "experts over expert_model_parallel_size only. Set expert_tensor_parallel_size to "
                "1; or leave expert_model_parallel_size and the row out: the model's own plan then "
                "splits every expert over the tensor-parallel ranks."
            )
        if num_experts % layout.ep:
            raise ShardingError(
                f"{num_experts} experts are not divisible by expert_model_parallel_size="
                f"{layout.ep}. Set it to a divisor of the experts."
            )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Take this rank's experts, and exchange tokens around the forward."""
        self.check(module, context.layout, plan)
        num_experts, ep = int(module.num_experts), context.ep  # type: ignore[arg-type]
        specs = _over_ep(module, ep)
        if ep.size == 1:
            module.shard_specs = specs  # type: ignore[assignment]
            return module
        take_shards(module, module, specs)
        module.num_experts = num_experts // ep.size  # type: ignore[assignment]
        dispatcher = AllToAllDispatch(context.axis("etp-ep"))
        replicas = ALONE if plan.is_sequence_parallel(context) else context.tp
        names = tuple(inspect.signature(module.forward).parameters)
        exchange = _ExchangeTokens(dispatcher, num_experts, replicas, names)
        module.register_forward_pre_hook(exchange.send, with_kwargs=True)
        module.register_forward_hook(exchange.receive)
        return module

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the experts over ``ep``."""
        for part in roles_of(module):
            for factor in (*part.inputs, *part.outputs):
                take_shards(factor, factor, _over_ep(factor, context.ep))


def _over_ep(module: nn.Module, ep: AxisGroup) -> dict[str, ShardSpec]:
    """Return the specs of a module's own parameters [E, ...], with experts over ``ep``."""
    return {
        name: ShardSpec.split(tuple(p.shape), dim=0, size=ep.size, rank=ep.rank, axis="ep")
        for name, p in module.named_parameters(recurse=False)
    }


def _check_stacked(module: nn.Module) -> None:
    """Check that the first dim of every parameter is the experts."""
    num_experts, shapes = getattr(module, "num_experts", None), {}
    adapters = attachment_of(module)
    adapter_ids = set[int]() if adapters is None else {id(p) for p in adapters.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in adapter_ids:
            shapes[name] = tuple(parameter.shape)
    if not shapes or any("." in n or s[:1] != (num_experts,) for n, s in shapes.items()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:3])
        raise ShardingError(
            "style DispatchedExperts takes a module with num_experts and stacked weights, "
            f"[num_experts, ...], and the plan points it at a {type(module).__name__} with "
            f"num_experts={num_experts} and {listed or 'no parameters'}. Where each expert is a "
            "module (transformers before 5, or code of the model's repository), install a newer "
            "transformers and load its own class; else correct the pattern."
        )


class _ExchangeTokens:
    """Hooks around one module, for the same call.

    Args:
        dispatcher: Sends rows to the ranks of their experts.
        num_experts: Experts of all ranks.
        replicas: Ranks with the same tokens. Each rank dispatches a part.
        names: Names of the arguments of the module's forward.
    """

    def __init__(
        self,
        dispatcher: AllToAllDispatch,
        num_experts: int,
        replicas: AxisGroup,
        names: tuple[str, ...],
    ) -> None:
        self._dispatcher = dispatcher
        self._num_experts = num_experts
        self._replicas = replicas
        self._names = names
        self._exchange: Exchange | None = None
        self._num_rows = 0
        self._num_tokens = 0

    def send(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Replace the arguments by the rows of this rank's experts, each with one choice of weight
        1.
        """
        hidden, index, weights = (*args, *(kwargs[name] for name in self._names[len(args) : 3]))
        self._num_tokens = len(hidden)
        hidden, index, weights = self._own(hidden), self._own(index), self._own(weights)
        routing, num_choices = self._routing(index, weights), index.shape[1]
        # A table from tokens to experts may name an expert twice (DeepSeek-V4). Waits for the
        # device.
        is_distinct = bool((routing.chosen.sum(1) == num_choices).all())
        exchange = self._dispatcher.begin(routing, num_choices if is_distinct else None)
        rows, counts = exchange.dispatch(hidden)
        self._exchange = exchange
        self._num_rows = len(rows)
        experts = torch.arange(len(counts), device=rows.device)
        experts = experts.repeat_interleave(counts, output_size=len(rows))[:, None]
        if not len(rows):
            # Without rows, the forward may not use the weights, and backward would skip the
            # exchange of tokens with the other ranks.
            rows, experts = F.pad(rows, (0, 0, 0, 1)), F.pad(experts, (0, 0, 0, 1))
        return (rows, experts, torch.ones_like(experts, dtype=weights.dtype)), {}

    def receive(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the weighted sums of the tokens."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            raise RuntimeError("the experts have returned without having been called")
        local_out = exchange.combine(output[: self._num_rows])
        return gather(local_out, self._replicas, 0)[: self._num_tokens]

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's part [t / n, ...] of a tensor replicated over the replicas.

        The last token is repeated until all parts have equal length.
        """
        num_padding = -len(x) % self._replicas.size
        return scatter(
            torch.cat([x, x[-1:].expand(num_padding, -1)]) if num_padding else x, self._replicas
        )

    def _routing(self, index: Tensor, weights: Tensor) -> Routing:
        probs = weights.new_zeros(len(index), self._num_experts)
        probs = probs.scatter_add(1, index, weights)
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, index, True)
        return Routing(probs, chosen, chosen.sum(0), index.new_zeros(()), losses=())
