"""Attention over several blocks as one differentiable operation, in eager mode and in graphs.

Eager mode uses an autograd function. ``torch.compile`` cannot trace messages between ranks, nor
blocks that depend on the documents of a batch. Compiled code calls an operator that is opaque to
the compiler. The operator takes plain values (communicators by name, documents as a tensor), so
graphs do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.config import AttentionBackend
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.merged import Sharing, sink_gradient, wide_dtype
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup

_SHARING = (
    "int[] ranks, int rank, str group, Tensor? documents, int[]? owners, bool causal, "
    "int? window, float scale, str backend, float? softcap"
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
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d]. ``softcap`` and ``sink`` [n]: see :class:`Sharing`.
        """
        sharing = Sharing(self.group, sequence, scale, backend, softcap)
        return self._attend(Inputs(q, k, v), sink, sharing)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        how: tuple[Attention, Sharing],
    ) -> Tensor:
        attention, sharing = ctx.how = how
        output = attention(Inputs(q, k, v), replace(sharing, sink=sink))
        ctx.save_for_backward(q, k, v, *output, sink)
        return output.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum, sink = ctx.saved_tensors
        (attention, sharing), output = ctx.how, Output(out, log_sum)
        of_sink = None if sink is None else sink_gradient(grad, output, sink)
        grads = attention.gradients(grad, Inputs(q, k, v), output, sharing)
        return grads[0], *grads[1], of_sink, None


def differentiable(name: str, attention: Attention) -> Callable[..., Tensor]:
    """Return a function of (inputs, sink, sharing) that computes ``attention`` with gradients.

    ``name`` names the operator.
    """
    operator = _operator(name, attention)

    def attend(inputs: Inputs, sink: Tensor | None, sharing: Sharing) -> Tensor:
        if not torch.compiler.is_compiling():
            # Eagerly an autograd function is enough. The operator below exists for the compiler,
            # which cannot trace collectives inside of a function of autograd.
            eager: Tensor = _Attend.apply(*inputs, sink, (attention, sharing))  # type: ignore[no-untyped-call]
            return eager
        group, sequence = sharing.group, sharing.sequence
        process_group, documents = group.process_group, sequence.documents
        traced: Tensor = operator(
            *inputs,
            sink,
            list(group.ranks),
            group.rank,
            "" if process_group is None else process_group.group_name,
            None if documents is None else documents.table,
            None if sequence.deal is None else list(sequence.deal.owners),
            sequence.causal,
            sequence.window,
            sharing.scale,
            sharing.backend,
            sharing.softcap,
        )[0]
        return traced

    return attend


def _operator(name: str, attention: Attention) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register ``attention`` and its gradients as operators."""
    forward_name = f"megatron_lightning::{name}"

    @torch.library.custom_op(
        forward_name,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_SHARING}) -> (Tensor, Tensor)",
    )
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *sharing: Any
    ) -> tuple[Tensor, Tensor]:
        return attention(Inputs(q, k, v), replace(_sharing(*sharing), sink=sink))

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
        # save_for_backward takes no None, so that absent tensors are left out and remembered.
        optional = (inputs[3], inputs[7])  # sinks and documents
        ctx.present = [tensor is not None for tensor in optional]
        ctx.save_for_backward(*inputs[:3], *output, *(x for x in optional if x is not None))
        ctx.before = inputs[4:7]
        ctx.after = inputs[8:]

    def differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, log_sum, *saved = ctx.saved_tensors
        optional = iter(saved)
        sink, table = (next(optional) if there else None for there in ctx.present)
        grad_q, grad_kv = backward(grad, q, k, v, out, log_sum, *ctx.before, table, *ctx.after)
        of_sink = None if sink is None else sink_gradient(grad, Output(out, log_sum), sink)
        nothing = (None,) * (len(ctx.before) + 1 + len(ctx.after))
        return grad_q, *grad_kv.unbind(), of_sink, *nothing

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _sharing(  # noqa: PLR0917 (operators are called by position)
    ranks: list[int],
    rank: int,
    group: str,
    documents: Tensor | None,
    owners: list[int] | None,
    causal: bool,
    window: int | None,
    scale: float,
    backend: AttentionBackend,
    softcap: float | None,
) -> Sharing:
    distributed: Any = dist.distributed_c10d
    process_group = distributed._resolve_process_group(group) if group else None
    deal = None if owners is None else Deal(tuple(owners))
    sequence = SequenceInfo(
        causal=causal,
        window=window,
        documents=None if documents is None else Documents.of_table(documents, deal),
    )
    own = AxisGroup("cp", tuple(ranks), rank, process_group)
    return Sharing(own, sequence, scale, backend, softcap)
