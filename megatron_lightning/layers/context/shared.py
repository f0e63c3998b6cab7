"""Attention over several blocks as one differentiable operation, in eager mode and in graphs.

Eager mode uses an autograd function. ``torch.compile`` cannot trace messages between ranks, nor
blocks that depend on the documents of a batch. Compiled code calls an operator that is opaque to
the compiler. The operator takes plain values (communicators by name, documents as a tensor), so
graphs do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.config import AttentionBackend
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.merged import Sharing, wide_dtype
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.documents import Documents

_SHARING = (
    "int[] ranks, int rank, str group, Tensor? documents, bool causal, int? window, "
    "float scale, str backend"
)


class Attention(Protocol):
    """Attention of a rank's queries, forward and backward."""

    def __call__(self, inputs: Inputs, sharing: Sharing) -> Output:
        """Return the outputs of queries [b, n, s, d] over all blocks of all ranks."""
        ...

    def gradients(
        self, grad: Tensor, inputs: Inputs, output: Output, sharing: Sharing
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries [b, n, s, d] and of keys and values [2, b, g, s, d]."""
        ...


class GroupAttention:
    """Attention between the queries of a rank and the keys of all ranks of a group.

    Args:
        group: The context-parallel ranks.
        attend: Function made by :func:`differentiable`.
    """

    def __init__(self, group: AxisGroup, attend: Callable[..., Tensor]) -> None:
        self.group = group
        self._attend = attend

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: SequenceInfo,
        scale: float,
        *,
        backend: AttentionBackend = "auto",
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].
        """
        return self._attend(Inputs(q, k, v), self.group, sequence, scale, backend)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: tuple[Attention, Sharing]
    ) -> Tensor:
        attention, sharing = ctx.how = how
        output = attention(Inputs(q, k, v), sharing)
        ctx.save_for_backward(q, k, v, *output)
        return output.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        attention, sharing = ctx.how
        grads = attention.gradients(grad, Inputs(q, k, v), Output(out, log_sum), sharing)
        return grads[0], *grads[1], None


def differentiable(name: str, attention: Attention) -> Callable[..., Tensor]:
    """Return a function of (inputs, group, sequence, scale, backend) that computes ``attention``
    with gradients. ``name`` names the operator.
    """
    operator = _operator(name, attention)

    def attend(
        inputs: Inputs,
        group: AxisGroup,
        sequence: SequenceInfo,
        scale: float,
        backend: AttentionBackend,
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            how = attention, Sharing(group, sequence, scale, backend)
            eager: Tensor = _Attend.apply(*inputs, how)  # type: ignore[no-untyped-call]
            return eager
        process_group, documents = group.process_group, sequence.documents
        traced: Tensor = operator(
            *inputs,
            list(group.ranks),
            group.rank,
            "" if process_group is None else process_group.group_name,
            None if documents is None else documents.table,
            sequence.causal,
            sequence.window,
            scale,
            backend,
        )[0]
        return traced

    return attend


def _operator(name: str, attention: Attention) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register ``attention`` and its gradients as operators."""
    forward_name = f"megatron_lightning::{name}"

    @torch.library.custom_op(
        forward_name,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {_SHARING}) -> (Tensor, Tensor)",
    )
    def forward(q: Tensor, k: Tensor, v: Tensor, *sharing: Any) -> tuple[Tensor, Tensor]:
        return attention(Inputs(q, k, v), _sharing(*sharing))

    @torch.library.custom_op(
        f"{forward_name}_backward",
        mutates_args=(),
        schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, "
        f"{_SHARING}) -> (Tensor, Tensor)",
    )
    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        inputs, output = Inputs(*given[:3]), Output(*given[3:5])
        return attention.gradients(grad, inputs, output, _sharing(*given[5:]))

    @forward.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))

    @backward.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), k.new_empty((2, *k.shape))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.documents = inputs[6] is not None
        ctx.save_for_backward(*inputs[:3], *output, *(inputs[6:7] if ctx.documents else ()))
        ctx.before = inputs[3:6]
        ctx.after = inputs[7:]

    def differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, log_sum, *documents = ctx.saved_tensors
        table = documents[0] if ctx.documents else None
        grad_q, grad_kv = backward(grad, q, k, v, out, log_sum, *ctx.before, table, *ctx.after)
        return grad_q, *grad_kv.unbind(), *(None,) * (len(ctx.before) + 1 + len(ctx.after))

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _sharing(  # noqa: PLR0917 (operators are called by position)
    ranks: list[int],
    rank: int,
    group: str,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    backend: AttentionBackend,
) -> Sharing:
    distributed: Any = dist.distributed_c10d
    process_group = distributed._resolve_process_group(group) if group else None
    sequence = SequenceInfo(
        causal=causal,
        window=window,
        documents=None if documents is None else Documents.of_table(documents),
    )
    return Sharing(AxisGroup("cp", tuple(ranks), rank, process_group), sequence, scale, backend)
