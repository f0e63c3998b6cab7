"""Kullback-Leibler divergences between two models' predictions, from logits with the vocabulary
split over the ranks.

With p = softmax(t / T) of the teacher's logits t and q = softmax(s / T) of the student's logits s,
sums over the vocabulary, and T the temperature:

    forward   T^2 sum_i p_i (log p_i - log q_i)     d s_i = T (q_i - p_i)
    reverse   T^2 sum_i q_i (log q_i - log p_i)     d s_i = T q_i (log q_i - log p_i - KL(q, p))
    top-k     forward, with p over the k largest entries of t only, and q over the vocabulary
    jsd       b KL(p, m) + (1 - b) KL(q, m), with m = b p + (1 - b) q
              d s_i = (1 - b) / T q_i (log q_i - log m_i - KL(q, m))

jsd is the generalized Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649), without T^2, as
TRL has it. At b = 0 it is KL(p, q), and at b = 1 KL(q, p).

T^2 keeps the gradients' size for any temperature (https://arxiv.org/abs/1503.02531, section 2.1).
The ranks reduce a few numbers a token, and the logits are never gathered. All arithmetic is in fp32
(fp64 for logits of fp64). Backward keeps one gradient of the student's logits in the logits' dtype,
and communicates nothing.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.losses.loss import Vocabulary
from megatron_lightning.parallel.collectives import all_reduce, gather

Direction = Literal["forward", "reverse"]


class TopLogits(NamedTuple):
    """The k largest logits of every token."""

    logits: Tensor
    """[..., k], falling."""
    ids: Tensor
    """[..., k] ids of the vocabulary."""


def divergence(
    student: Tensor,
    teacher: Tensor,
    vocabulary: Vocabulary,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
) -> Tensor:
    """Return the divergence of every token [...] in fp32.

    Args:
        student: [..., v / ranks] this rank's logits.
        teacher: [..., v / ranks] this rank's logits of the same entries. Gets no gradient.
        vocabulary: The ranks, and the size of the full vocabulary.
        direction: See the module.
        temperature: Divisor of the logits.
    """
    reverse = direction == "reverse"
    out: Tensor = _Divergence.apply(student, teacher, vocabulary, reverse, temperature)  # type: ignore[no-untyped-call]
    return out


def jensen_shannon(
    student: Tensor,
    teacher: Tensor,
    vocabulary: Vocabulary,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of every token [...] in fp32.

    Args:
        student: [..., v / ranks] this rank's logits.
        teacher: [..., v / ranks] this rank's logits of the same entries. Gets no gradient.
        vocabulary: The ranks, and the size of the full vocabulary.
        beta: Weight of the teacher, from 0 to 1.
        temperature: Divisor of the logits.
    """
    if beta in (0.0, 1.0):
        direction: Direction = "reverse" if beta else "forward"
        plain = divergence(
            student, teacher, vocabulary, direction=direction, temperature=temperature
        )
        return plain / temperature**2
    out: Tensor = _JensenShannon.apply(student, teacher, vocabulary, beta, temperature)  # type: ignore[no-untyped-call]
    return out


def top_divergence(
    student: Tensor, teacher: TopLogits, vocabulary: Vocabulary, *, temperature: float = 1.0
) -> Tensor:
    """Return the forward divergence [...] in fp32 from the teacher's largest logits.

    Args:
        student: [..., v / ranks] this rank's logits.
        teacher: Of the full vocabulary. Gets no gradient.
        vocabulary: The ranks, and the size of the full vocabulary.
        temperature: Divisor of the logits.
    """
    out: Tensor = _TopDivergence.apply(student, *teacher, vocabulary, temperature)  # type: ignore[no-untyped-call]
    return out


def top_logits(logits: Tensor, vocabulary: Vocabulary, k: int) -> TopLogits:
    """Return the k largest logits of every token, equal on all ranks.

    Each rank sends its own k largest.

    Args:
        logits: [..., v / ranks] this rank's logits.
        vocabulary: The ranks, and the size of the full vocabulary.
        k: At most the size of the vocabulary.
    """
    num_local = min(k, logits.shape[-1])
    values, ids = logits.topk(num_local, dim=-1)
    group = vocabulary.group
    if group.size == 1:
        return TopLogits(values, ids)
    ids = ids + vocabulary.start
    if num_local < k:  # equal shapes on every rank
        padding_shape = (*values.shape[:-1], k - num_local)
        values = torch.cat([values, values.new_full(padding_shape, float("-inf"))], -1)
        ids = torch.cat([ids, ids.new_zeros(padding_shape)], -1)
    values, ids = gather(values, group), gather(ids, group)
    values, places = values.topk(k, dim=-1)
    return TopLogits(values, ids.gather(-1, places))


def _log_softmax(logits: Tensor, vocabulary: Vocabulary, temperature: float) -> Tensor:
    """Return the log-probabilities of this rank's entries."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if vocabulary.group.size == 1:
        return scaled.log_softmax(-1)
    is_empty = not scaled.shape[-1]  # the last ranks of a padded vocabulary
    local_max = (
        scaled.new_full((*scaled.shape[:-1], 1), float("-inf"))
        if is_empty
        else scaled.amax(-1, True)
    )
    top = all_reduce(local_max, vocabulary.group, "max")
    scaled = scaled - top
    total = all_reduce(scaled.exp().sum(-1, keepdim=True), vocabulary.group)
    return scaled - total.log()


def _sum(terms: Tensor, vocabulary: Vocabulary) -> Tensor:
    return all_reduce(terms.sum(-1), vocabulary.group)


class _OfStudent(torch.autograd.Function):
    """A value of every token. Forward saves the gradient of the first of five inputs."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[..., None]).to(gradient.dtype), None, None, None, None


class _Divergence(_OfStudent):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        vocabulary: Vocabulary,
        reverse: bool,
        temperature: float,
    ) -> Tensor:
        log_q = _log_softmax(student, vocabulary, temperature)
        log_p = _log_softmax(teacher, vocabulary, temperature).to(log_q.dtype)
        if reverse:
            log_ratio, q = log_q - log_p, log_q.exp()
            value = _sum(q * log_ratio, vocabulary)
            gradient = q * (log_ratio - value[..., None])
        else:
            p = log_p.exp()
            # An entry that the teacher excludes has log p = -inf and counts 0.
            value = _sum((p * (log_p - log_q)).masked_fill(p == 0, 0.0), vocabulary)
            gradient = log_q.exp() - p
        ctx.save_for_backward((gradient * temperature).to(student.dtype))
        return value * temperature**2


class _JensenShannon(_OfStudent):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        vocabulary: Vocabulary,
        beta: float,
        temperature: float,
    ) -> Tensor:
        log_q = _log_softmax(student, vocabulary, temperature)
        log_p = _log_softmax(teacher, vocabulary, temperature).to(log_q.dtype)
        # Ratios to the mixture, not its logarithm: where the models agree they are near 1.
        difference = log_p - log_q
        p, q = log_p.exp(), log_q.exp()
        teacher_ratio = -_log_mixed(-difference, 1 - beta).masked_fill(p == 0, 0.0)
        log_ratio = -_log_mixed(difference, beta).masked_fill(q == 0, 0.0)
        of_teacher = _sum(p * teacher_ratio, vocabulary)
        of_student = _sum(q * log_ratio, vocabulary)
        gradient = q * (log_ratio - of_student[..., None])
        ctx.save_for_backward((gradient * ((1 - beta) / temperature)).to(student.dtype))
        return beta * of_teacher + (1 - beta) * of_student


def _log_mixed(log_ratio: Tensor, weight: float) -> Tensor:
    """Return log(weight e^x + 1 - weight) of log-ratios x, exact near 0 and without overflow."""
    near = torch.log1p(weight * torch.expm1(log_ratio.clamp(max=1.0)))
    far = log_ratio + torch.log1p((1 - weight) * torch.expm1(-log_ratio.clamp(min=1.0)))
    return torch.where(log_ratio > 1.0, far, near)


class _TopDivergence(_OfStudent):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        student: Tensor,
        logits: Tensor,
        ids: Tensor,
        vocabulary: Vocabulary,
        temperature: float,
    ) -> Tensor:
        log_q = _log_softmax(student, vocabulary, temperature)
        log_p = (logits.to(log_q.dtype) / temperature).log_softmax(-1)
        local_ids = ids - vocabulary.start
        elsewhere = (local_ids < 0) | (local_ids >= student.shape[-1])
        local_ids = local_ids.masked_fill(elsewhere, 0)
        picked = log_q.gather(-1, local_ids).masked_fill(elsewhere, 0.0)
        picked = all_reduce(picked, vocabulary.group)
        p = log_p.exp()
        value = (p * (log_p - picked)).masked_fill(p == 0, 0.0).sum(-1)
        gradient = log_q.exp().scatter_add(-1, local_ids, -p.masked_fill(elsewhere, 0.0))
        ctx.save_for_backward((gradient * temperature).to(student.dtype))
        return value * temperature**2
