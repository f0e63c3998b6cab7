"""The router of a mixture of experts: the experts of each token, the weights of the experts, and
the losses.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``t`` tokens (s b), ``E`` experts, ``k`` experts
of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.layers.moe.choice import (
    ChooseExperts,
    Limited,
    assign_experts,
    choose_experts,
    limit_tokens,
    mask_at,
    normalized,
    router_scores,
)
from megatron_lightning.layers.moe.losses import RouterLoss, imbalance
from megatron_lightning.parallel.random.rng import RngStreams


@dataclass(frozen=True)
class Routing:
    """Result of a router. Tokens are in the order of ``hidden.flatten(0, 1)``."""

    probs: Tensor
    """[t, E] weights of the experts' outputs. Differentiable."""
    chosen: Tensor
    """[t, E] tokens computed by each expert, including padding to the capacity."""
    tokens_per_expert: Tensor
    """[E] this rank's tokens routed to each expert, including dropped tokens."""
    num_dropped: Tensor
    """[] dropped choices of this rank's tokens."""
    losses: tuple[RouterLoss, ...]
    """The losses. Empty in evaluation."""


class Router(nn.Module):
    """A GEMM with ``weight`` [E, h] and optional ``bias`` [E], and routing by the logits.

    The module is plain. For ranks that share tokens, a plan sets ``streams``, ``sum_counts`` and
    ``global_counts``. Each call returns its counts, and stores nothing.

    Args:
        hidden_size: Width of the tokens (h).
        moe: The layer's configuration.
        init_method_std: Standard deviation of the initial weights.
        choose: See :func:`~megatron_lightning.layers.moe.choice.route`.
    """

    expert_bias: Tensor | None
    gemm: Gemm = Gemm()
    """GEMM of the router, in the router's dtype."""

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        *,
        init_method_std: float = 0.02,
        choose: ChooseExperts = choose_experts,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.choose = choose
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=init_method_std)
        self.bias = nn.Parameter(torch.zeros(moe.num_experts)) if moe.router_bias else None
        bias = torch.zeros(moe.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias if moe.router_enable_expert_bias else None)
        self.equal_buffers = ("expert_bias",)  # equal over ranks: follows the counts of all ranks
        self.is_exact = False
        """Whether each token gets its chosen experts, as in generated text, without capacity and
        forced balancing. Both would make a token depend on other tokens.
        """
        self.streams: RngStreams | None = None
        self.stream_name = "model-parallel-rng"
        self.sum_counts: Callable[[Tensor], Tensor] = _same
        """Sum of counts [b, E] over the ranks with other tokens of the same sequences.

        Returns a new tensor.
        """
        self.global_counts: Callable[[Tensor], Tensor] = _same
        """Map counts [E] of a micro-batch to counts of the optimizer step so far, over all
        ranks.
        """

    def forward(
        self, hidden: Tensor, is_padding: Tensor | None = None, given: Tensor | None = None
    ) -> Routing:
        """Route the tokens of ``hidden`` [s, b, h].

        Tokens with ``is_padding`` [s, b] count neither in the losses nor in the numbers of tokens,
        nor in the experts' capacity.
        ``given`` [t, k]: experts of recorded routes, weighed by the scores of this router.

        Raises:
            ConfigError: If given experts could be dropped, or scores are random.
        """
        moe = self.moe
        if given is not None and not self.is_exact:
            _check_replayed(moe)
        logits_sbE = self._logits(hidden)
        logits = logits_sbE.flatten(0, 1)
        bias = None if self.expert_bias is None else self.expert_bias.detach()
        probs, choices = assign_experts(logits, moe, bias, self.choose, given)
        is_counted = choices if is_padding is None else choices & ~is_padding.reshape(-1, 1)
        # Padding takes no capacity. Without a capacity, padding has as many experts as other
        # tokens.
        limited = Limited(probs, choices, choices.new_zeros((), dtype=torch.int64))
        if moe.expert_capacity_factor is not None and not self.is_exact:
            flat_padding = None if is_padding is None else is_padding.flatten()
            limited = limit_tokens(probs, is_counted, moe, flat_padding)
        return Routing(
            probs=limited.probs,
            chosen=limited.chosen,
            tokens_per_expert=is_counted.sum(dim=0),
            num_dropped=limited.num_dropped,
            losses=self._losses(logits_sbE, is_padding) if self.training else (),
        )

    def _stream(self) -> AbstractContextManager[None]:
        """Return a context that draws from the right stream."""
        return nullcontext() if self.streams is None else self.streams.fork(self.stream_name)

    def _logits(self, hidden: Tensor) -> Tensor:
        moe = self.moe
        dtype = torch.float64 if moe.router_dtype == "fp64" else torch.float32
        hidden = hidden.to(dtype)
        if self.training and moe.input_jitter_eps is not None:
            with self._stream():
                low, high = 1.0 - moe.input_jitter_eps, 1.0 + moe.input_jitter_eps
                hidden = hidden * torch.empty_like(hidden).uniform_(low, high)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = matmul(hidden, self.weight.to(dtype), bias, self.gemm)
        if moe.router_force_load_balancing and not self.is_exact:
            with self._stream():
                random = torch.empty_like(logits).normal_()
            logits = random + (logits - logits.detach())  # keeps the gradient of the logits
        return logits

    def _losses(self, logits_sbE: Tensor, is_padding: Tensor | None) -> tuple[RouterLoss, ...]:
        moe, coefficients = self.moe, self.moe.auxiliary_losses
        if not coefficients and not moe.z_loss_coeff:
            return ()
        scores_sbE = router_scores(logits_sbE, moe)
        if moe.router_score_function != "softmax":
            scores_sbE = normalized(scores_sbE)
        # The losses see the best experts by score, without biases, groups and capacity.
        best = mask_at(scores_sbE, scores_sbE.topk(moe.router_topk, dim=-1).indices)
        squares_sb = logits_sbE.logsumexp(dim=-1).square()
        # Padding takes part in no mean, and still passes the layer.
        if is_padding is not None:
            best = best & ~is_padding[..., None]
            scores_sbE = scores_sbE.masked_fill(is_padding[..., None], 0.0)
            squares_sb = squares_sb.masked_fill(is_padding, 0.0)
        with torch.no_grad():
            counts_bE = self.sum_counts(best.sum(dim=0))
            counts = counts_bE.sum(dim=0)
        values: dict[str, Tensor] = {}
        for kind in coefficients:
            if kind == "seq_aux_loss":
                values[kind] = imbalance(scores_sbE, counts_bE, moe)
            else:
                over = self.global_counts(counts) if kind == "global_aux_loss" else None
                values[kind] = imbalance(scores_sbE.flatten(0, 1), counts, moe, over)
        losses = [RouterLoss(name, values[name], coefficients[name]) for name in coefficients]
        if moe.z_loss_coeff:
            num_tokens = (counts.sum() / moe.router_topk).clamp(min=1.0)
            losses.append(RouterLoss("z_loss", squares_sb.sum() / num_tokens, moe.z_loss_coeff))
        return tuple(losses)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # The bias moves with the module and stays fp32: steps of 1e-3 vanish in bf16.
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is None or after is None:
            return self
        if before.is_meta and not after.is_meta:
            self.expert_bias = torch.zeros_like(after, dtype=torch.float32)
        elif after.dtype != torch.float32:
            self.expert_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Return the sizes, for ``print``."""
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.moe.num_experts}"


def _check_replayed(moe: MoEConfig) -> None:
    """Check that recorded routes can be computed as recorded."""
    if moe.expert_capacity_factor is not None:
        raise ConfigError(
            f"routes are replayed with moe.expert_capacity_factor={moe.expert_capacity_factor}: "
            "text is written without a capacity, and here experts would drop tokens of the "
            "recorded routes. Set expert_capacity_factor to None."
        )
    if moe.router_force_load_balancing:
        raise ConfigError(
            "routes are replayed with moe.router_force_load_balancing=True, which weighs experts "
            "by random scores. Set it to False."
        )


def _same(counts: Tensor) -> Tensor:
    return counts
