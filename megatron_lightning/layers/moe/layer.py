"""A feed-forward layer of experts. A few experts compute each token.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``l`` latent (h without latents), ``t`` = s b
tokens, ``n`` rows (a token for one expert).

Logged, for each layer (``name/path of the layer``) and under the name alone:

    aux_loss, seq_aux_loss, global_aux_loss, z_loss   times their coefficients. Alone: summed
    expert_load   tokens of the busiest expert over the mean of all, 1 if balanced, with dropped
                  tokens, over a batch and all ranks. Alone: the largest of the layers
    drop_rate     share of dropped choices, if experts have a capacity. Alone: mean

and with ``logs_tokens``, for each expert of each layer (``tokens_per_expert/path/number``), the
number of tokens routed to the expert, over a batch and all ranks.

A compiled layer is several graphs: router, experts and shared experts. The code in between runs
uncompiled, since it depends on the data, waits for other ranks, or reports to the step.
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
from megatron_lightning.layers.moe.losses import RouterLoss
from megatron_lightning.layers.moe.router import Router, Routing
from megatron_lightning.layers.moe.routes import Routes
from megatron_lightning.layers.step_report import LossScale, StepReport
from megatron_lightning.parallel.collectives import (
    all_reduce,
    copy_to_axis,
    gather,
    reduce_from_axis,
    scatter,
)
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup


class GlobalCounts:
    """Tokens per expert in the optimizer step so far, for one layer and ``global_aux_loss``.

    The counts are summed over the data-parallel ranks and over the micro-batches so far, as in
    Megatron-Core. A layer counts only in the first forward. A recomputation gets the counts of the
    first forward of the micro-batch.

    Args:
        report: The layer's report. The report knows the micro-batch.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        self.replicas = ALONE
        """Data-parallel ranks."""
        self.reset()

    def reset(self) -> None:
        """Begin an optimizer step."""
        self._sum: Tensor | None = None
        # By micro-batch: its mark, the number of runs of the layer, and the returned sum.
        self._given: dict[int, tuple[LossScale, int, Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, counts: Tensor) -> Tensor:
        """Add ``counts`` [E] of a micro-batch and of all data-parallel ranks. Return the sum.

        Raises:
            ConfigError: In the recomputation of a layer with several runs in a micro-batch.
        """
        microbatch = self._report.microbatch
        if not self._report.is_recorded:
            _, times, given_counts = self._given.get(microbatch.index, (None, 1, counts))
            if times > 1:
                raise ConfigError(
                    f"a layer with moe.router_load_balancing_type=global_aux_loss ran {times} "
                    "times in one micro-batch and is recomputed, and its counts grow from each "
                    "time to the next. Do not recompute it, or set the type to aux_loss."
                )
            return given_counts
        mark = microbatch.scale_of_reports()
        last, times, _ = self._given.get(microbatch.index, (None, 0, counts))
        summed = all_reduce(counts, self.replicas)
        self._sum = summed.clone() if self._sum is None else self._sum + summed
        self._given[microbatch.index] = mark, times + 1 if last is mark else 1, self._sum
        return self._sum


TOKENS_PER_EXPERT = "tokens_per_expert"
"""Count in a layer's report: [E] tokens of this rank routed to each expert."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(dispatcher: Dispatcher, routing: Routing, num_choices: int | None) -> Exchange:
    return dispatcher.begin(routing, num_choices)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatch(exchange: Exchange, own: Tensor) -> tuple[Tensor, Tensor]:
    return exchange.dispatch(own.flatten(0, 1))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _combine(exchange: Exchange, outputs: Tensor) -> Tensor:
    return exchange.combine(outputs)


class SharedExperts(MLP):
    """Shared experts for every token, as one feed-forward layer.

    Args:
        config: Sizes.
        ffn_size: Total width of the shared experts.
        gated_output: Whether a learned gate multiplies the output.
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

    The layer is plain: all experts are on this rank until the style ``ExpertParallel`` sets another
    dispatcher.

    Args:
        config: Sizes.
        moe: Router, experts and dispatch.
    """

    def __init__(self, config: TransformerConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config.hidden_size, moe)
        self.experts = Experts(config, moe.num_experts)
        h, latent, bias = config.hidden_size, moe.latent_size, config.add_bias_linear
        self.fc1_latent_proj = nn.Linear(h, latent, bias=bias) if latent else None
        self.fc2_latent_proj = nn.Linear(latent, h, bias=bias) if latent else None
        shared_size = moe.shared_expert_intermediate_size
        self.shared_experts = (
            SharedExperts(config, shared_size, gated_output=moe.shared_expert_gate)
            if shared_size
            else None
        )
        self.report = StepReport(per_layer=True)
        self.global_counts = self.router.global_counts = GlobalCounts(self.report)
        self.dispatcher: Dispatcher = LocalDispatch()
        self.replicas: AxisGroup = ALONE
        """Ranks with the same tokens. Each rank dispatches a part."""
        self.sharing: tuple[AxisGroup, AxisGroup] = (ALONE, ALONE)
        """Tensor- and context-parallel ranks with other tokens of the same sequences."""
        self.logs_tokens = False
        """Whether the layer logs the tokens of every expert.

        The callback ExpertLoadMonitor sets the flag.
        """
        self.number: int | None = None
        """Number among the layers of experts of the full model. None: the layer has no routes."""
        self._num_choices = moe.router_topk if moe.expert_capacity_factor is None else None

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(
        self, hidden: Tensor, routes: Routes | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Map [s, b, h] to [s, b, h].

        Args:
            hidden: This rank's tokens.
            routes: Experts to follow, or to record. None: the router chooses.
            padding: [b, s] whether a token is padding, of all tensor-parallel ranks. None: none is.
        """
        local_hidden = self._own(hidden)
        first, count = self._first_token(local_hidden), local_hidden.shape[:-1].numel()
        is_padding = self._is_padding(hidden, local_hidden, padding)
        given_routes = None if routes is None else routes.given(self.number, first, count)
        routing = self.router(local_hidden, is_padding, given_routes)
        if routes is not None:
            routes.take(self.number, first, routing.chosen)
        exchange = _begin(self.dispatcher, routing, self._num_choices)
        # While the numbers of rows travel.
        shared_out = None if self.shared_experts is None else self.shared_experts(hidden)
        # Tokens travel as latents. The sums over a token's experts are mapped back.
        down, up = self.fc1_latent_proj, self.fc2_latent_proj
        rows, counts = _dispatch(exchange, local_hidden if down is None else down(local_hidden))
        sums = _combine(exchange, self.experts(rows, counts))
        out: Tensor = self._finish(sums if up is None else up(sums), routing, hidden)
        return out if shared_out is None else out + shared_out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finish(self, sums: Tensor, routing: Routing, hidden: Tensor) -> Tensor:
        """Map sums [t, h] of this rank's tokens to all [s, b, h]. The result carries the losses."""
        return self._full(self._report(routing, sums), hidden)

    def _report(self, routing: Routing, out: Tensor) -> Tensor:
        """Report a routing. Return the activation with the losses attached."""
        report, counts = self.report, routing.tokens_per_expert
        for loss in routing.losses:
            out = report.loss(loss.name, self._total(loss), out)
        report.count(TOKENS_PER_EXPERT, counts)
        report.value("expert_load", counts, "peak")
        if self.logs_tokens:
            # The log averages over tensor-parallel ranks, and each rank has different tokens.
            tensor_size = self.sharing[0].size * self.replicas.size
            report.value(TOKENS_PER_EXPERT, counts * tensor_size, "each")
        if self.router.moe.expert_capacity_factor is not None:
            report.value("drop_rate", routing.num_dropped / counts.sum().clamp(min=1))
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _own(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens [s, b, h], or the rank's part [t, 1, h] of replicated tokens,
        filled up to equal parts.

        Raises:
            ConfigError: For gradients of replicated tokens.
        """
        size = self.replicas.size
        if size == 1:
            return hidden
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"a layer of experts trains on {size} tensor-parallel ranks that have the same "
                "tokens, since sequence_parallel=False. Set sequence_parallel to True or auto."
            )
        tokens = hidden.flatten(0, 1)
        num_padding = -len(tokens) % size
        return scatter(F.pad(tokens, (0, 0, 0, num_padding)), self.replicas)[:, None]

    def _is_padding(self, hidden: Tensor, own: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return whether tokens of ``own`` [s, b, h] are padding [s, b], of rows or of equal parts.
        None: no token is.
        """
        first, count = self._first_token(own), own.shape[:-1].numel()
        if padding is None:
            num_tokens = hidden.shape[:-1].numel()
            if self.replicas.size == 1 or num_tokens % self.replicas.size == 0:
                return None
            padding = torch.zeros(1, num_tokens, dtype=torch.bool, device=hidden.device)
        is_padding = padding.t().flatten()[first : first + count]
        return F.pad(is_padding, (0, count - len(is_padding)), value=True).view(own.shape[:2])

    def _first_token(self, own: Tensor) -> int:
        """Return the number of this rank's first token among the tokens [s, b] of all
        tensor-parallel ranks.
        """
        tensor = self.replicas if self.replicas.size > 1 else self.sharing[0]
        return tensor.rank * own.shape[0] * own.shape[1]

    def _full(self, out: Tensor, hidden: Tensor) -> Tensor:
        if self.replicas.size > 1:
            out = gather(out, self.replicas, 0)[: hidden.shape[0] * hidden.shape[1]]
        return out.view(hidden.shape)

    def _total(self, loss: RouterLoss) -> Tensor:
        """Return a loss over all tokens of the sequences, summed over ranks with parts.

        Tensor-parallel ranks add up the gradients of the router, and context-parallel ranks each
        weigh their loss separately.
        """
        tensor, context = self.sharing
        total = reduce_from_axis(loss.weighted, tensor)
        return copy_to_axis(reduce_from_axis(total, context), context)
