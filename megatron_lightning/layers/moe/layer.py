"""A feed-forward layer of experts: each token is computed by a few of them.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``t`` = s b tokens, ``n`` rows (a token that one
expert computes).

Logged, for each layer (``name/path of the layer``) and under the name alone:

    aux_loss, seq_aux_loss, global_aux_loss, z_loss   times their coefficients; alone: summed
    expert_load   tokens of the busiest expert over the mean of all, 1 if balanced, with those that
                  are dropped, over a batch and all ranks; alone: the largest of the layers
    drop_rate     share of the choices that were dropped, where experts have a capacity; alone: mean

and with ``logs_tokens``, for each expert of each layer (``tokens_per_expert/path/number``), the
tokens that chose it, over a batch and all ranks.

Compiled, a layer is several graphs: router, experts and shared experts. What stands between them
runs uncompiled, since it depends on the data, waits for other ranks, or reports to the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.dispatch import Dispatcher, Exchange, LocalDispatch
from megatron_lightning.layers.moe.experts import Experts
from megatron_lightning.layers.moe.router import Router, RouterLoss, Routing
from megatron_lightning.layers.step_report import LossScale, StepReport
from megatron_lightning.parallel.collectives import (
    all_reduce,
    copy_to_axis,
    gather,
    reduce_from_axis,
    scatter,
)
from megatron_lightning.parallel.context import ALONE, AxisGroup


class GlobalCounts:
    """Tokens per expert of the optimizer step so far, for one layer, as ``global_aux_loss`` needs
    them in the forward.

    They are summed over the data-parallel ranks and over the micro-batches so far, as in
    Megatron-Core. A layer counts when its forward runs first. A recomputation gets what the first
    forward of its micro-batch got.

    Args:
        report: The layer's, which knows the micro-batch.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        self.replicas = ALONE
        """Data-parallel ranks."""
        self.reset()

    def reset(self) -> None:
        """Begin an optimizer step."""
        self._sum: Tensor | None = None
        # By micro-batch: its mark, how often the layer has run, and what it got.
        self._given: dict[int, tuple[LossScale, int, Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, counts: Tensor) -> Tensor:
        """Add ``counts`` [E] of one micro-batch, and of all data-parallel ranks; return the sum.

        Raises:
            ConfigError: In the recomputation of a layer that runs several times in a micro-batch.
        """
        microbatch = self._report.microbatch
        if not self._report.is_recorded:
            _, times, given = self._given.get(microbatch.index, (None, 1, counts))
            if times > 1:
                raise ConfigError(
                    f"a layer with moe.router_load_balancing_type=global_aux_loss ran {times} "
                    "times in one micro-batch and is recomputed, and its counts grow from each "
                    "time to the next. Do not recompute it, or set the type to aux_loss."
                )
            return given
        mark = microbatch.scale_of_reports()
        last, times, _ = self._given.get(microbatch.index, (None, 0, counts))
        summed = all_reduce(counts, self.replicas)
        self._sum = summed.clone() if self._sum is None else self._sum + summed
        self._given[microbatch.index] = mark, times + 1 if last is mark else 1, self._sum
        return self._sum


TOKENS_PER_EXPERT = "tokens_per_expert"
"""Count of a layer's report: [E] tokens of this rank that chose an expert."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(dispatcher: Dispatcher, routing: Routing, num_choices: int | None) -> Exchange:
    return dispatcher.begin(routing, num_choices)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatch(exchange: Exchange, own: Tensor) -> tuple[Tensor, Tensor]:
    return exchange.dispatch(own.flatten(0, 1))


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
        self.global_counts = self.router.global_counts = GlobalCounts(self.report)
        self.dispatcher: Dispatcher = LocalDispatch()
        self.replicas: AxisGroup = ALONE
        """Ranks with the same tokens, of which each dispatches a part."""
        self.sharing: tuple[AxisGroup, AxisGroup] = (ALONE, ALONE)
        """Tensor- and context-parallel ranks that hold other tokens of the same sequences."""
        self.logs_tokens = False
        """Whether the tokens of every expert are logged; the callback ExpertLoadMonitor sets it."""
        self._num_choices = moe.router_topk if moe.expert_capacity_factor is None else None

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        own, is_padding = self._own(hidden)
        routing = self.router(own, is_padding)
        exchange = _begin(self.dispatcher, routing, self._num_choices)
        # While the numbers of rows travel.
        shared = None if self.shared_experts is None else self.shared_experts(hidden)
        rows, counts = _dispatch(exchange, own)
        out: Tensor = self._combine(exchange, self.experts(rows, counts), routing, hidden)
        return out if shared is None else out + shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _combine(
        self, exchange: Exchange, outputs: Tensor, routing: Routing, hidden: Tensor
    ) -> Tensor:
        """Return the sums [s, b, h] over the tokens' experts, which carry the losses."""
        return self._full(self._report(routing, exchange.combine(outputs)), hidden)

    def _report(self, routing: Routing, out: Tensor) -> Tensor:
        """Report a routing; return the activation, which carries its losses."""
        report, counts = self.report, routing.tokens_per_expert
        for loss in routing.losses:
            out = report.loss(loss.name, self._total(loss), out)
        report.count(TOKENS_PER_EXPERT, counts)
        report.value("expert_load", counts, "peak")
        if self.logs_tokens:
            # The mean over tensor-parallel ranks is logged, and each has tokens of its own.
            tensor_size = self.sharing[0].size * self.replicas.size
            report.value(TOKENS_PER_EXPERT, counts * tensor_size, "each")
        if self.router.moe.expert_capacity_factor is not None:
            report.value("drop_rate", routing.num_dropped / counts.sum().clamp(min=1))
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _own(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's tokens [s, b, h], or of replicated ones its part [t, 1, h]; and which
        of them are padding, if any.

        Raises:
            ConfigError: For gradients of replicated tokens.
        """
        size = self.replicas.size
        if size == 1:
            return hidden, None
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"a layer of experts trains on {size} tensor-parallel ranks that have the same "
                "tokens, since sequence_parallel=False. Set sequence_parallel to True or auto."
            )
        tokens = hidden.flatten(0, 1)
        missing = -len(tokens) % size
        own = scatter(F.pad(tokens, (0, 0, 0, missing)), self.replicas)[:, None]
        if not missing:
            return own, None
        first = self.replicas.rank * len(own)
        places = torch.arange(first, first + len(own), device=own.device)
        return own, (places >= len(tokens))[:, None]

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
