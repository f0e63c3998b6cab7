"""Capped scores and sinks: the definition by plain products, forward and backward, every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.attention_backend import attend_unfused
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.context import kernels
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.layers.losses.loss import CrossEntropy
from tests.helpers.layouts import tiny_config

LENGTH, BATCH, HEADS, GROUPS, SIZE = 21, 2, 4, 2, 8
CASES: dict[str, dict[str, Any]] = {
    "cap": {"softcap": 1.3},
    "sink": {"num_sinks": HEADS},
    "cap, sink, window": {"softcap": 1.3, "num_sinks": HEADS, "window": 4},
    "sink, math": {"num_sinks": HEADS, "backend": "math"},
}


def _visible(core: CoreAttention, sequence: SequenceInfo) -> Tensor:
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    visible = (back >= 0) & (back <= (LENGTH if core.window is None else core.window))
    if sequence.documents is not None:
        positions = sequence.documents.positions()[0]
        numbers = (positions == 0).cumsum(0)
        visible = visible & (numbers[:, None] == numbers)
    return visible


def _expected(core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """gpt-oss: a column of the sink beside the scores, dropped after the softmax."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * 0.5
    if core.softcap is not None:
        scores = core.softcap * torch.tanh(scores / core.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if core.softmax_offset is not None:
        column = core.softmax_offset.view(-1, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :LENGTH]
    return torch.einsum("bnst,tbne->sbne", weights, v).flatten(2)


@pytest.mark.parametrize("piece", [256, 8])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_definition(
    name: str, documents: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PIECE", piece)
    core = CoreAttention(0.0, **CASES[name]).double()
    generator = torch.Generator().manual_seed(4)
    if core.softmax_offset is not None:
        core.softmax_offset.data.normal_(0.0, 2.0, generator=generator)
    shapes = [(LENGTH, BATCH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    grad = values.pop().flatten(2)
    ids = torch.arange(LENGTH).ge(9).long().expand(BATCH, LENGTH)
    sequence = SequenceInfo(documents=Documents.of_ids(ids) if documents else None)
    found, expected = list[Tensor](), list[Tensor]()
    for results, compute in (
        (found, lambda q, k, v: core(q, k, v, sequence, 0.5)),
        (expected, lambda q, k, v: _expected(core, q, k, v, _visible(core, sequence))),
    ):
        inputs = [x.clone().requires_grad_() for x in values]
        out = compute(*inputs)
        out.backward(grad)
        results += [out.detach(), *(x.grad for x in inputs)]  # type: ignore[misc]
        if core.softmax_offset is not None:
            results.append(core.softmax_offset.grad.clone())  # type: ignore[union-attr]
            core.zero_grad()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_unfused_attention_of_a_cache(mask: Any) -> None:
    core = CoreAttention(0.0, softcap=1.3, num_sinks=HEADS).double()
    torch.nn.init.constant_(core.softmax_offset, 0.7)  # type: ignore[arg-type]
    q, k, v = (torch.randn(LENGTH, BATCH, n, SIZE).double() for n in (HEADS, GROUPS, GROUPS))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    expected = _expected(core, q, k, v, visible if mask is None else visible.tril())
    out = attend_unfused(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), mask=mask, scale=0.5, softcap=1.3,
        sink=core.softmax_offset,
    )  # fmt: skip
    torch.testing.assert_close(out.permute(2, 0, 1, 3).flatten(2), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_capped_logits(smoothing: float) -> None:
    plain = CrossEntropy(label_smoothing=smoothing, z_loss=1e-2)
    loss = CrossEntropy(label_smoothing=smoothing, z_loss=1e-2, softcap=1.5)
    logits, targets = torch.randn(6, 11) * 3, torch.randint(0, 11, (6,))
    one, other, fused = (logits.clone().requires_grad_() for _ in range(3))
    expected = plain(1.5 * torch.tanh(other / 1.5), targets)
    expected.sum().backward()
    found = loss(one, targets)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(one.grad, other.grad)
    vocabulary = loss.vocabulary(11)
    local = vocabulary.targets(targets, 11)
    terms = vocabulary.terms(fused.detach(), local.ids)
    losses, normalizer = vocabulary.combine(terms, local, 11)
    torch.testing.assert_close(losses, expected.detach())
    grad = vocabulary.logits_grad(torch.ones(6), fused.detach(), local, terms[0], normalizer)
    torch.testing.assert_close(grad, other.grad)


SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11
}  # fmt: skip
CAPPED = {"attn_logit_softcapping": 5.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            CAPPED | {"attention_backend": "flash"},
            "flash has no soft caps.* is 5.0. Set it to auto or math",
        ),
        (CAPPED | {"attention_dropout": 0.1}, "attention_dropout=0.1 cannot be combined"),
        ({"softmax_type": "learnable", "attention_dropout": 0.1}, "softmax_type=learnable. Set"),
        ({"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one'.*vanilla, learnable"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0.*above 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0.*above 0"),
    ],
)
def test_what_has_no_kernel_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**SIZES, **options)


def test_kernels_without_caps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"flash has no soft caps"):
        kernel_for(torch.device("cpu"), "flash", 3.0)
    assert kernel_for(torch.device("cuda"), "auto", 3.0).name == "matrix products and a softmax"
