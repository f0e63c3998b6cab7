"""A feed-forward layer of experts: each token is computed by a few of them.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``t`` = s b tokens, ``n`` rows (a token that one
expert computes).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.dispatch import Dispatcher, LocalDispatch
from megatron_lightning.layers.moe.experts import Experts
from megatron_lightning.layers.moe.router import Router, RouterLoss
from megatron_lightning.layers.report import StepReport
from megatron_lightning.parallel.collectives import (
    copy_to_axis,
    gather,
    reduce_from_axis,
    scatter,
)
from megatron_lightning.parallel.context import ALONE, AxisGroup

TOKENS_PER_EXPERT = "tokens_per_expert"
"""Count of a layer's report: [E] tokens of this rank that chose an expert."""


class SharedExperts(MLP):
    """Experts that see every token, as one feed-forward layer.

    Args:
        config: Sizes.
        ffn_size: Their width together.
        gated_output: Whether their output is multiplied by a learned gate.
    """

    def __init__(self, config: TransformerConfig, ffn_size: int, *, gated_output: bool) -> None:
        super().__init__(config, ffn_size)
        self.gate = nn.Linear(config.hidden_size, 1, bias=False) if gated_output else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        out = super().forward(hidden)
        return out if self.gate is None else out * self.gate(hidden).sigmoid()


class MoELayer(nn.Module):
    """Router, experts and shared experts.

    It is plain: all experts are on this rank until the style ``ExpertParallel`` gives it another
    dispatcher.

    Args:
        config: Sizes.
        moe: Router, experts and dispatch.
    """

    def __init__(self, config: TransformerConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config.hidden_size, moe)
        self.experts = Experts(config, moe.num_experts)
        shared = moe.shared_expert_intermediate_size
        self.shared_experts = (
            SharedExperts(config, shared, gated_output=moe.shared_expert_gate) if shared else None
        )
        self.report = StepReport(per_layer=True)
        self.dispatcher: Dispatcher = LocalDispatch()
        self.replicas: AxisGroup = ALONE
        """Ranks with the same tokens, of which each dispatches a part."""
        self.sharing: tuple[AxisGroup, AxisGroup] = (ALONE, ALONE)
        """Tensor- and context-parallel ranks that hold other tokens of the same sequences."""
        self._num_choices = moe.router_topk if moe.expert_capacity_factor is None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        own = self._own(hidden)
        routing = self.router(own)
        exchange = self.dispatcher.begin(routing, self._num_choices)
        # While the numbers of rows travel.
        shared = None if self.shared_experts is None else self.shared_experts(hidden)
        rows, counts = exchange.dispatch(own.flatten(0, 1))
        out = exchange.combine(self.experts(rows, counts))
        for loss in routing.losses:
            out = self.report.loss(loss.name, self._total(loss), out)
        self.report.count(TOKENS_PER_EXPERT, routing.tokens_per_expert)
        out = self._full(out, hidden)
        return out if shared is None else out + shared

    def _own(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens [s, b, h], or of replicated ones its part [t, 1, h]."""
        size = self.replicas.size
        if size == 1:
            return hidden
        tokens = hidden.flatten(0, 1)
        padded = F.pad(tokens, (0, 0, 0, -len(tokens) % size))
        return scatter(padded, self.replicas)[:, None]

    def _full(self, out: Tensor, hidden: Tensor) -> Tensor:
        if self.replicas.size > 1:
            out = gather(out, self.replicas, 0)[: hidden.shape[0] * hidden.shape[1]]
        return out.view(hidden.shape)

    def _total(self, loss: RouterLoss) -> Tensor:
        """Return a loss over all tokens of the sequences, of which each rank has a part.

        Over tensor-parallel ranks, whose gradients of the router are added up, and over
        context-parallel ones, which weigh their losses each by itself.
        """
        tensor, context = self.sharing
        total = reduce_from_axis(loss.weighted, tensor)
        return copy_to_axis(reduce_from_axis(total, context), context)
