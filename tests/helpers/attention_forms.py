"""Whether a row of the table of attention kernels tells the truth: every form of attention is
computed, or refused, as its row says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config.attention_kernels import KERNELS, AttentionBackend, KernelForm
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo

LENGTH, BATCH, HEADS, GROUPS, SIZE, SCALE = 21, 2, 4, 2, 8, 0.5
DOCUMENT_IDS = torch.arange(LENGTH).ge(9).long().expand(BATCH, LENGTH)


def forms(device: str, dtype: str) -> Iterator[KernelForm]:
    """Yield every combination of windows, caps, sinks, documents, dropout and training."""
    for window, softcap, sinks, documents, dropout, trained in itertools.product(
        (None, 4), (None, 1.3), (False, True), (False, True), (0.0, 0.5), (True, False)
    ):
        if trained or not dropout:
            yield KernelForm(
                device=device, dtype=dtype, trained=trained, dropout=dropout, window=window,
                softcap=softcap, has_sinks=sinks, has_documents=documents,
            )  # fmt: skip


def inputs_of(form: KernelForm) -> list[Tensor]:
    """Return queries, keys and values [s, b, n, d]."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(LENGTH, BATCH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [
        x.to(form.device, getattr(torch, str(form.dtype))).requires_grad_(form.trained)
        for x in made
    ]


def core_of(backend: Any, form: KernelForm) -> CoreAttention:
    """Return a layer's attention of a form."""
    core = CoreAttention(
        form.dropout, backend=backend, window=form.window, softcap=form.softcap,
        num_sinks=HEADS if form.has_sinks else 0,
    ).to(form.device)  # fmt: skip
    if core.softmax_offset is not None:
        core.softmax_offset.data.copy_(torch.linspace(-2, 2, HEADS))
    return core.train(form.trained)


def computed(backend: Any, form: KernelForm) -> list[Tensor]:
    """Return contexts, and gradients of queries, keys and values if they are computed."""
    inputs, core = inputs_of(form), core_of(backend, form)
    sequence = SequenceInfo(
        documents=Documents.of_ids(DOCUMENT_IDS) if form.has_documents else None
    )
    with torch.set_grad_enabled(form.trained):
        return _with_gradients(core(*inputs, sequence, SCALE), inputs, trained=form.trained)


def defined(form: KernelForm) -> list[Tensor]:
    """Return :func:`computed` by the definition, with all scores in fp64."""
    inputs, core = inputs_of(form), core_of("auto", form)
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * SCALE
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    visible = (back >= 0) & (back <= (LENGTH if form.window is None else form.window))
    if form.has_documents:
        visible = visible & (DOCUMENT_IDS[0][:, None] == DOCUMENT_IDS[0])
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    if core.softmax_offset is not None:
        column = core.softmax_offset.detach().double().view(-1, 1, 1)
        scores = torch.cat((scores, column.expand(BATCH, HEADS, LENGTH, 1)), -1)
    out = torch.einsum("bnst,tbne->sbne", scores.softmax(-1)[..., :LENGTH], v).flatten(2)
    return _with_gradients(out, inputs, trained=form.trained)


def _with_gradients(out: Tensor, inputs: list[Tensor], *, trained: bool) -> list[Tensor]:
    results = [out.detach()]
    if trained:
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))
        results += [x.grad for x in inputs if x.grad is not None]
    return [x.double().cpu() for x in results]


def complaint(name: AttentionBackend, form: KernelForm, tolerance: float) -> str | None:
    """Return what a kernel does other than its row says. None: the row is true."""
    reason = KERNELS[name].supports(form)
    try:
        found = computed(name, form)
    except ConfigError as error:
        return None if reason else f"{name} supports {form!r}, and refuses it: {error}"
    except Exception as error:  # whatever torch or a kernel raises
        return f"{name} fails on {form!r} without a refusal: {error!r}"
    if reason:
        return f"{name} computes {form!r}, and says that it {reason}"
    expected = defined(replace(form, dropout=0.0))
    is_equal = len(found) == len(expected) and all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance)
        for one, other in zip(found, expected, strict=True)
    )
    if is_equal == (form.dropout > 0):
        return f"{name} computes other values than {form!r} has"
    return None
