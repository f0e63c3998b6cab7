"""The router of a mixture of experts: the experts of each token, the weights of the experts, and
the balancing losses.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``t`` tokens (s b), ``E`` experts, ``k`` experts
of a token. Three sets of numbers per token and expert are kept apart:

    logits   the router's GEMM
    scores   softmax, sigmoid or sqrt(softplus) of the logits. Scores plus a bias choose
             the experts. Losses use all scores, divided by their sum
    probs    weights of the chosen experts' outputs, 0 for all others

The balancing loss is E sum_e f_e P_e with f_e the fraction of choices for expert e and P_e the mean
score of e (Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2. Per sequence:
DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.2.3. Over the global batch:
https://arxiv.org/abs/2501.11873). f counts the best k scores, without bias, groups and capacity. A
rank with part of the tokens computes a partial loss: the summed scores of local tokens over the
number of all tokens, with counts of all tokens. Partial losses add up to the loss. With
``global_aux_loss``, f covers the data-parallel ranks and micro-batches of the optimizer step so
far, and P covers one micro-batch. Like the main loss, ``global_aux_loss`` is averaged over
data-parallel ranks and micro-batches. (Megatron-Core divides P by the tokens of all data-parallel
ranks and also averages, so the coefficient shrinks with the number of ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.moe import LoadBalancing, MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.gemm import Gemm, matmul
from megatron_lightning.parallel.rng import RngStreams

ChooseExperts = Callable[[Tensor, MoEConfig], Tensor]


def choose_experts(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Return the indices [t, k] of the best experts by ``scores`` [t, E].

    With groups, choose only from the best groups.
    """
    k, groups, group_topk = moe.router_topk, moe.router_num_groups, moe.router_group_topk
    if groups is not None and group_topk is not None and moe.group_best is not None:
        grouped = scores.unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
        group_scores = grouped.topk(moe.group_best, dim=-1).values.sum(dim=-1)
        allowed = _mask(group_scores, group_scores.topk(group_topk, dim=-1).indices)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return scores.topk(k, dim=-1).indices


def route(
    logits: Tensor,
    moe: MoEConfig,
    expert_bias: Tensor | None = None,
    *,
    choose: ChooseExperts = choose_experts,
) -> tuple[Tensor, Tensor]:
    """Route every token to experts, up to the experts' capacity.

    Scores are computed in fp32, or in fp64 for fp64 logits.

    Args:
        logits: [t, E] outputs of the router's matmul.
        moe: The layer's configuration.
        expert_bias: [E] numbers added to the scores for the choice of experts.
        choose: Function of the scores [t, E], with bias, and ``moe``. Returns the indices of the
            chosen experts [t, k].

    Returns:
        Probabilities [t, E] in the dtype of ``logits``, 0 except for chosen experts, and whether an
        expert is chosen, [t, E]. With ``pad_expert_input_to_capacity`` additional tokens of
        probability 0 are marked as chosen, so that every expert has min(capacity, t) tokens.
    """
    return _limit(*_assign(logits, moe, expert_bias, choose), moe)


def _assign(
    logits: Tensor,
    moe: MoEConfig,
    expert_bias: Tensor | None,
    choose: ChooseExperts,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return probabilities and choices [t, E] before any token is dropped.

    ``given``: [t, k] experts in the place of the best experts. A negative entry: the token has
    none.
    """
    if logits.dim() != 2 or logits.shape[1] != moe.num_experts:
        raise ConfigError(
            f"logits have the shape {list(logits.shape)}, and moe.num_experts is "
            f"{moe.num_experts}; they need one column for each expert. Pass [tokens, "
            f"{moe.num_experts}]."
        )
    softmax = moe.router_score_function == "softmax"
    if softmax and expert_bias is not None:
        raise ConfigError(
            "expert_bias with moe.router_score_function=softmax: a bias is for scores of which "
            "each expert has its own. Set router_score_function to sigmoid or sqrtsoftplus."
        )
    if expert_bias is not None and expert_bias.shape != logits.shape[1:]:
        raise ConfigError(
            f"expert_bias has the shape {list(expert_bias.shape)}, and moe.num_experts is "
            f"{moe.num_experts}; every expert has one. Pass [{moe.num_experts}]."
        )
    scores = _wide(logits) if softmax and not moe.router_pre_softmax else _scores(logits, moe)
    # The bias decides who is chosen, and not the weight of the choice: it must not reach the
    # probabilities.
    ranked = scores.detach()
    indices = choose(ranked if expert_bias is None else ranked + expert_bias, moe)
    if given is not None:
        # Two sources would choose an expert of a token twice.
        is_whole = given.amin(1, keepdim=True) >= 0
        indices = torch.where(is_whole, given.long(), indices)
    weights = scores.gather(1, indices)
    # Softmax over the chosen logits alone, as Megatron does unless router_pre_softmax is set.
    if softmax and not moe.router_pre_softmax:
        weights = weights.softmax(dim=-1)
    elif not softmax and moe.router_topk > 1:
        weights = _normalize(weights)
    if moe.router_topk_scaling_factor is not None:
        weights = weights * moe.router_topk_scaling_factor
    probs = torch.zeros_like(logits).scatter(1, indices, weights.to(logits.dtype))
    return probs, _mask(logits, indices)


def _limit(probs: Tensor, chosen: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Drop tokens above the experts' capacity, and fill experts up to the capacity if configured.

    The queue of an expert holds chosen tokens first, by probability or position, then all other
    tokens. Equal tokens keep their order. topk does not keep the order of equal values.
    """
    capacity = expert_capacity(len(probs), moe)
    if capacity is None:
        return probs, chosen
    rank = probs.detach() if moe.token_drop_policy == "probs" else torch.ones_like(probs)
    queue = rank.masked_fill(~chosen, -1.0).sort(dim=0, descending=True, stable=True).indices
    is_kept = torch.zeros_like(chosen).scatter(0, queue[:capacity], True)
    if not moe.pad_expert_input_to_capacity:
        is_kept &= chosen
    return probs * is_kept, is_kept


def expert_capacity(num_tokens: int, moe: MoEConfig) -> int | None:
    """Return the capacity of one expert for ``num_tokens`` tokens. None: unlimited."""
    if moe.expert_capacity_factor is None:
        return None
    # In Megatron-Core's order of operations, as a product may lie just above an integer.
    share = num_tokens * moe.router_topk / moe.num_experts
    return math.ceil(share * moe.expert_capacity_factor)


def auxiliary_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    moe: MoEConfig,
    *,
    kind: LoadBalancing | None = None,
) -> Tensor:
    """Return a balancing loss times the coefficient, averaged over the sequences if there are
    several.

    Args:
        scores: [t, E] or [s, b, E] scores of this rank's tokens. The scores of a token sum to 1.
        tokens_per_expert: [E] or [b, E] number of tokens with an expert among their best k, over
            all ranks with partial losses.
        moe: The layer's configuration.
        kind: Type that names the coefficient. Required if several types are configured.
    """
    coefficients = moe.auxiliary_losses
    if kind is None and len(coefficients) > 1:
        raise ConfigError(
            f"auxiliary_loss with moe.router_load_balancing_type={list(coefficients)}: each has a "
            "coefficient of its own. Pass kind."
        )
    coefficient = sum(coefficients.values()) if kind is None else coefficients.get(kind, 0.0)
    return coefficient * _imbalance(scores, tokens_per_expert, moe)


def _imbalance(
    scores: Tensor, tokens_per_expert: Tensor, moe: MoEConfig, over: Tensor | None = None
) -> Tensor:
    """Return the balancing loss without coefficient. The loss is 1 if all experts are used equally.

    ``over``: counts for the fractions, over more tokens than ``scores``.
    """

    def num_choices(counts: Tensor) -> Tensor:
        return counts.sum(dim=-1, keepdim=True).to(scores.dtype).clamp(min=moe.router_topk)

    over = tokens_per_expert if over is None else over
    means = scores.sum(dim=0) / (num_choices(tokens_per_expert) / moe.router_topk)
    return (means * (over / num_choices(over))).sum(dim=-1).mean() * moe.num_experts


def z_loss(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Return the mean of logsumexp^2 over ``logits`` [t, E] times the coefficient (ST-MoE,
    https://arxiv.org/abs/2202.08906, section 3).
    """
    squares = _wide(logits).logsumexp(dim=-1).square()
    return (moe.z_loss_coeff or 0.0) * squares.sum() / max(len(squares), 1)


@torch.no_grad()
def updated_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, moe: MoEConfig) -> Tensor:
    """Return ``expert_bias`` [..., E] raised for experts with less than the mean number of tokens
    and lowered for experts with more (https://arxiv.org/abs/2408.15664).

    Args:
        expert_bias: Biases of the last step. Not changed.
        tokens_per_expert: [..., E] tokens of the whole optimizer step, over all ranks.
        moe: The layer's configuration.
    """
    # Integers: the sign near the mean is exact for any number of tokens.
    excess = tokens_per_expert * tokens_per_expert.shape[-1] - tokens_per_expert.sum(-1, True)
    return expert_bias - moe.router_bias_update_rate * excess.sign().to(expert_bias.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    logits = _wide(logits)
    if moe.router_score_function == "softmax":
        return logits.softmax(dim=-1)
    if moe.router_score_function == "sigmoid":
        return logits.sigmoid()
    # The slope of the root is infinite at 0, and softplus underflows to 0.
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def _normalize(scores: Tensor) -> Tensor:
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _mask(like: Tensor, indices: Tensor) -> Tensor:
    """Return booleans of the shape of ``like``, true at ``indices`` of the last dim."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, indices, True)


@dataclass(frozen=True)
class RouterLoss:
    """A loss of a router, to be added to the main loss."""

    name: str
    """aux_loss, seq_aux_loss, global_aux_loss or z_loss."""
    value: Tensor
    """[] this rank's part of the loss, without coefficient. Differentiable."""
    coefficient: float
    """Factor of the value in the total loss."""

    @property
    def weighted(self) -> Tensor:
        """The value times the coefficient."""
        return self.coefficient * self.value


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
        choose: See :func:`route`.
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

        Tokens with ``is_padding`` [s, b] count neither in the losses nor in the numbers of tokens.
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
        probs, choices = _assign(logits, moe, bias, self.choose, given)
        is_counted = choices if is_padding is None else choices & ~is_padding.reshape(-1, 1)
        # Padding takes no capacity. Without a capacity, padding has as many experts as other
        # tokens.
        has_capacity = moe.expert_capacity_factor is not None and not self.is_exact
        if has_capacity:
            probs, chosen = _limit(probs, is_counted, moe)
        else:
            chosen = choices
        return Routing(
            probs=probs,
            chosen=chosen,
            tokens_per_expert=is_counted.sum(dim=0),
            num_dropped=(is_counted & ~chosen).sum(),
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
        scores_sbE = _scores(logits_sbE, moe)
        if moe.router_score_function != "softmax":
            scores_sbE = _normalize(scores_sbE)
        # The losses see the best experts by score, without biases, groups and capacity.
        best = _mask(scores_sbE, scores_sbE.topk(moe.router_topk, dim=-1).indices)
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
                values[kind] = _imbalance(scores_sbE, counts_bE, moe)
            else:
                over = self.global_counts(counts) if kind == "global_aux_loss" else None
                values[kind] = _imbalance(scores_sbE.flatten(0, 1), counts, moe, over)
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
