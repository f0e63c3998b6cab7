"""Token losses: plain cross entropy, and vocabulary-parallel cross entropy without a gather of the
logits.

With x the logits of a token, t the target, and sums over the vocabulary of v entries,

    lse    = log sum_i exp(x_i)
    loss   = lse - (1 - e) x_t - e mean_i(x_i) + z lse^2
    d x_i  = (1 + 2 z lse) exp(x_i - lse) - (1 - e) [i = t] - e / v

where e is the label smoothing, as in ``F.cross_entropy``, and z the weight of the z-loss (PaLM,
https://arxiv.org/abs/2204.02311, section 5). The z-loss keeps lse near 0. With a temperature, x are
the logits divided by it, as a sampler divides them. Entropies, lse - sum_i p_i x_i with p the
softmax of x, are computed beside losses on request, without gradients. The parallel form follows
Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): each rank reduces its part of the
vocabulary to a few numbers a token, and the tensor-parallel ranks combine the numbers. All
arithmetic is in fp32 (fp64 for logits of fp64). Backward keeps the logits in their original dtype
and two numbers a token. ``layers.linear_loss`` uses the same functions on chunks of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.linear.embedding import local_ids
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import shard_range

ALONE = AxisGroup("tp", (0,), 0, None)
"""Group of a rank with the full vocabulary."""


class CrossEntropy(nn.Module):
    """Per-token cross entropy in fp32. A plan replaces the class by the vocabulary-parallel class.

    Args:
        ignore_index: Target with zero loss and gradient.
        label_smoothing: Probability moved from the target to all entries.
        z_loss: Weight of the squared log-sum-exp added to the loss.
        softcap: Logits x become softcap tanh(x / softcap) first. None: unchanged.
        temperature: Divisor of the logits, behind the cap.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.temperature = temperature
        self.entropies: list[Tensor] | None = None
        """Gets the entropies [n] of the tokens of every call, in the order of the targets. None:
        they are not computed."""

    def vocabulary(self, size: int, group: AxisGroup | None = None) -> Vocabulary:
        """Return how losses over ``size`` entries are computed on this rank.

        ``group``: Ranks that share the entries. None: the ranks of the loss, here this rank alone.
        """
        return Vocabulary(
            group or ALONE,
            size,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            self.temperature,
            self.entropies,
        )

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses [...] of ``logits`` [..., v] for ``targets`` [...]."""
        flat = scaled(logits.float().flatten(0, -2), self.softcap, self.temperature)
        if self.entropies is not None:
            self.entropies.append(entropies(flat.detach().log_softmax(-1)))
        losses = F.cross_entropy(
            flat,
            targets.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        if self.z_loss:
            squared = flat.logsumexp(dim=-1).square()
            losses = losses + self.z_loss * squared.masked_fill(
                targets.flatten() == self.ignore_index, 0.0
            )
        return losses.view(targets.shape)


class VocabParallelCrossEntropy(CrossEntropy):
    """:class:`CrossEntropy` for logits with the last dim split over the ranks.

    See :func:`vocab_parallel_cross_entropy`.
    """

    def __init__(
        self,
        group: AxisGroup,
        vocab_size: int,
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(
            ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap
        )
        self.group = group
        self.vocab_size = vocab_size

    @classmethod
    def from_loss(
        cls, loss: CrossEntropy, group: AxisGroup, vocab_size: int
    ) -> VocabParallelCrossEntropy:
        """Change the loss of full logits in place, and return the loss."""
        return change_class(loss, cls, group=group, vocab_size=vocab_size)

    def vocabulary(self, size: int, group: AxisGroup | None = None) -> Vocabulary:
        """See the base class."""
        return super().vocabulary(size, group or self.group)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses [...] of this rank's ``logits`` [..., v / ranks] for ``targets`` [...]."""
        return losses_of(logits, targets, self.vocabulary(self.vocab_size))


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: AxisGroup,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross entropy of every token in fp32, from logits with the last dim split over the
    ranks.

    Args:
        logits: [..., v / ranks] this rank's logits.
        targets: [...] ids of the full vocabulary.
        group: The tensor-parallel ranks.
        vocab_size: Size of the full vocabulary, if the last ranks hold fewer entries. None: all
            ranks hold equally many.
        ignore_index: Target with zero loss and gradient.

    Returns:
        [...] losses, equal on every rank.
    """
    size = vocab_size or logits.shape[-1] * group.size
    return losses_of(logits, targets, Vocabulary(group, size, ignore_index))


# ------------------------------------------------------------------------- parts of a vocabulary


class Targets(NamedTuple):
    """Targets of n tokens, relative to a rank's rows of the vocabulary."""

    ids: Tensor
    """[n], relative to the rank's first row."""
    elsewhere: Tensor
    """[n], whether another rank has the row."""
    ignored: Tensor
    """[n], whether loss and gradient are zero."""

    def part(self, tokens: slice) -> Targets:
        """Return the targets of a range of tokens."""
        return Targets(*(tensor[tokens] for tensor in self))


class Factors(NamedTuple):
    """Numbers of the gradient of n tokens' logits, beside the softmax of the rank's logits."""

    softmax: Tensor
    """[n], factor of the softmax."""
    target: Tensor
    """[n], added to the gradient of the target's entry."""
    every: Tensor | None
    """[n], subtracted from the gradient of every entry. None: nothing."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary with rows split over ranks, and the loss over the vocabulary. n tokens, r rows
    on this rank.
    """

    group: AxisGroup
    """Ranks that share the vocabulary."""
    size: int
    """Entries of the full vocabulary."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    entropies: list[Tensor] | None = field(default=None, compare=False)
    """See :class:`CrossEntropy`."""

    @property
    def start(self) -> int:
        """First entry of this rank."""
        return shard_range(self.size, self.group.size, self.group.rank)[0]

    def targets(self, targets: Tensor, num_rows: int) -> Targets:
        """Return ``targets`` [...], ids of the full vocabulary, for this rank's rows."""
        start = self.start
        targets = targets.flatten()
        ignored = targets == self.ignore_index
        ids = targets.masked_fill(ignored, start)
        return Targets(*local_ids(ids, start, num_rows, self.group), ignored)

    def terms(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the terms of the loss [k, n] for this rank's ``logits`` [n, r]: the log-sum-exp.

        The other terms are relative to the log-sum-exp: the logit of ``targets`` [n], for smoothed
        labels the sum of all logits and, on request, the entropy of this rank's softmax.
        """
        logits = self._scaled(logits)
        log_p = logits.log_softmax(-1, dtype=_wide(logits.dtype))
        # Subtract maxima, not any two entries. Entries may be far larger than the difference.
        terms = [logits.amax(-1) - log_p.amax(-1), log_p.gather(-1, targets[:, None]).squeeze(-1)]
        if self.label_smoothing:
            terms.append(log_p.sum(-1))
        if self.entropies is not None:
            terms.append(entropies(log_p))
        return torch.stack(terms)

    def combine(self, terms: Tensor, targets: Targets, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return losses and log-sum-exps over the full vocabulary, [n], from the ranks' terms."""
        maximum = all_reduce(terms[0], self.group, "max")
        shift = terms[0] - maximum
        sums = [shift.exp(), (terms[1] + shift).masked_fill(targets.elsewhere, 0.0)]
        if self.label_smoothing:
            sums.append(terms[2] + num_rows * shift)
        if self.entropies is not None:
            # A rank has the part w = exp(shift) / total of the softmax, and adds w (H - log w).
            sums.append((terms[-1] - shift) * shift.exp())
        total, picked, *further_sums = all_reduce(torch.stack(sums), self.group).unbind()
        log_total = total.log()
        if self.entropies is not None:
            self.entropies.append(further_sums[-1] / total + log_total)
        normalizer = maximum + log_total
        losses = log_total - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing:
            losses = losses - self.label_smoothing / self.size * further_sums[0]
        if self.z_loss:
            losses = losses + self.z_loss * normalizer.square()
        return losses.masked_fill(targets.ignored, 0.0), normalizer

    def logits_grad(
        self, grad: Tensor, logits: Tensor, targets: Targets, own: Tensor, normalizer: Tensor
    ) -> Tensor:
        """Return the gradient of this rank's ``logits`` [n, r] in fp32.

        Args:
            grad: Gradient of the losses [n].
            logits: [n, r].
            targets: Of the same tokens.
            own: Log-sum-exp of the rank's logits [n].
            normalizer: Log-sum-exp over the full vocabulary [n].
        """
        factors = self.factors(grad, targets, own, normalizer)
        logits = self._scaled(logits)
        slope = slope_of(logits, self.softcap, self.temperature)
        # In place from here on: a temporary would be as large as the logits.
        grad_logits = logits.softmax(-1, dtype=_wide(logits.dtype)).mul_(factors.softmax[:, None])
        grad_logits.scatter_add_(-1, targets.ids[:, None], factors.target[:, None])
        if factors.every is not None:
            grad_logits.sub_(factors.every[:, None])
        return grad_logits if slope is None else grad_logits.mul_(slope)

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.softcap is None and self.temperature == 1.0:
            return logits
        return scaled(logits.to(_wide(logits.dtype)), self.softcap, self.temperature)

    def factors(self, grad: Tensor, targets: Targets, own: Tensor, normalizer: Tensor) -> Factors:
        """Return the numbers of the gradient of the tokens' logits.

        Args:
            grad: Gradient of the losses [n].
            targets: Of the same tokens.
            own: Log-sum-exp of the rank's logits [n].
            normalizer: Log-sum-exp over the full vocabulary [n].
        """
        grad = grad.masked_fill(targets.ignored, 0.0)
        # softmax over the full vocabulary = softmax over this rank's logits, times exp(own -
        # normalizer).
        softmax = grad * (own - normalizer).exp()
        if self.z_loss:
            softmax = softmax * (1.0 + 2.0 * self.z_loss * normalizer)
        target = ((self.label_smoothing - 1.0) * grad).masked_fill(targets.elsewhere, 0.0)
        every = self.label_smoothing / self.size * grad if self.label_smoothing else None
        return Factors(softmax, target, every)


def entropies(log_p: Tensor) -> Tensor:
    """Return the entropies [n] of log-probabilities [n, v], which may be minus infinity."""
    least = torch.finfo(log_p.dtype).min
    negative: Tensor = torch.linalg.vecdot(log_p.exp(), log_p.clamp(min=least))
    return -negative


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap tanh(x / softcap), or ``x`` without a cap."""
    return x if softcap is None else (x / softcap).tanh() * softcap


def scaled(x: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """Return logits ``x`` with a cap, divided by the temperature."""
    x = capped(x, softcap)
    return x if temperature == 1.0 else x / temperature


def slope_of(x: Tensor, softcap: float | None, temperature: float) -> Tensor | float | None:
    """Return the derivative of :func:`scaled` by the logits, from its result ``x``. None: 1."""
    if softcap is not None:
        return (1.0 - (x * (temperature / softcap)).square()) / temperature
    return None if temperature == 1.0 else 1.0 / temperature


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Loss(torch.autograd.Function):
    """Forward: losses, with a few numbers a token reduced over the ranks. Backward is local."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        flat = logits.flatten(0, -2)
        local_targets = vocabulary.targets(targets, flat.shape[-1])
        terms = vocabulary.terms(flat, local_targets.ids)
        losses, normalizer = vocabulary.combine(terms, local_targets, flat.shape[-1])
        ctx.save_for_backward(logits, *local_targets, terms[0], normalizer)
        ctx.vocabulary = vocabulary
        return losses.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, *local_targets, local_sum, normalizer = ctx.saved_tensors
        grad_logits = ctx.vocabulary.logits_grad(
            grad.flatten(), logits.flatten(0, -2), Targets(*local_targets), local_sum, normalizer
        )
        return grad_logits.to(logits.dtype).view(logits.shape), None, None


def losses_of(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the losses [...] of this rank's ``logits`` [..., r] for ``targets`` [...]."""
    losses: Tensor = _Loss.apply(logits, targets, vocabulary)  # type: ignore[no-untyped-call]
    return losses
