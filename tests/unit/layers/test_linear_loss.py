"""Output layer and loss as one: losses and gradients equal those of ``F.cross_entropy`` of all
logits, which are never held.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from megatron_lightning.layers.linear.gemm import Gemm
from megatron_lightning.layers.losses.linear_loss import (
    Head,
    OutputLinear,
    chunk_tokens,
    linear_losses,
)
from megatron_lightning.layers.losses.loss import ALONE, CrossEntropy, Vocabulary
from megatron_lightning.layers.losses.loss_kernels import loss_gradient, loss_terms
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import shard_range
from tests.helpers.layouts import tiny_config

TOKENS, HIDDEN, VOCABULARY = 23, 12, 301


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias, targets (some ignored) and weights of the losses."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 2, HIDDEN, generator=draw)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    bias = torch.randn(VOCABULARY, generator=draw)
    targets = torch.randint(VOCABULARY, (TOKENS, 2), generator=draw)
    targets[0, 1] = targets[7, 0] = -100
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)]
    return leaves[0], leaves[1], leaves[2], targets, torch.rand(TOKENS, 2, generator=draw)


def _head(**options: Any) -> Head:
    loss = CrossEntropy(
        label_smoothing=options.pop("label_smoothing", 0.0), z_loss=options.pop("z_loss", 0.0)
    )
    return Head(Gemm(), loss.vocabulary(VOCABULARY), None, False, **options)


def _expected(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float, z: float
) -> Tensor:
    logits = F.linear(x, weight, bias).float().flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=smoothing)
    squared = z * logits.logsumexp(-1).square()
    return (losses + squared.masked_fill(targets.flatten() == -100, 0.0)).view(targets.shape)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("chunk", [1, 7, 46, 100, None])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)], ids=["plain", "smoothed"])
def test_losses_and_gradients_equal_cross_entropy(
    keep: bool, chunk: int | None, smoothing: float, z: float
) -> None:
    x, weight, bias, targets, weights = _inputs(torch.float32)
    head = _head(chunk_tokens=chunk, keep_logits=keep, label_smoothing=smoothing, z_loss=z)
    losses = linear_losses(x, weight, bias, targets, head)
    expected = _expected(x, weight, bias, targets, smoothing, z)
    assert losses.dtype == torch.float32
    assert losses[0, 1] == losses[7, 0] == 0
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    leaves = (x, weight, bias)
    grads = torch.autograd.grad((losses * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_bf16_is_as_near_to_fp32_as_cross_entropy_is(keep: bool) -> None:
    """A chunk's gradient of the weight is rounded to bf16 before it is added in fp32: of 7 chunks
    here the error is 6 % larger than that of one rounding at the end.
    """
    x, weight, bias, targets, weights = _inputs(torch.bfloat16)
    losses = linear_losses(x, weight, bias, targets, _head(chunk_tokens=7, keep_logits=keep))
    plain = _expected(x, weight, bias, targets, 0.0, 0.0)
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)]
    wide = _expected(*exact, targets, 0.0, 0.0)
    torch.testing.assert_close(losses, plain, rtol=1e-6, atol=1e-6)
    leaves = (x, weight, bias)
    ours = torch.autograd.grad((losses * weights).sum(), leaves)
    theirs = torch.autograd.grad((plain * weights).sum(), leaves)
    for grad, peer, want in zip(
        ours, theirs, torch.autograd.grad((wide * weights).sum(), exact), strict=True
    ):
        assert grad.dtype == torch.bfloat16
        assert (grad - want).norm() <= 1.2 * (peer - want).norm()


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_gradients_are_those_of_finite_differences(keep: bool) -> None:
    x, weight, bias, targets, _ = _inputs(torch.float64)
    inputs = tuple(t.detach().requires_grad_() for t in (x[:4], weight[:9], bias[:9]))
    head = Head(
        Gemm(), CrossEntropy(label_smoothing=0.1, z_loss=0.1).vocabulary(9), None, False, 3, keep
    )
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_losses(*leaves, targets[:4] % 9, head), inputs
    )


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight, bias, targets, _ = _inputs(torch.float32)
    head = _head(chunk_tokens=7)
    linear_losses(x.detach(), weight, None, targets, head).sum().backward()
    linear_losses(x, weight.detach(), bias.detach(), targets, head).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is None
    with torch.no_grad():
        assert linear_losses(x, weight, bias, targets, head).shape == targets.shape


def test_a_backward_can_be_repeated() -> None:
    x, weight, bias, targets, _ = _inputs(torch.float32)
    for keep in (False, True):
        total = linear_losses(x, weight, bias, targets, _head(chunk_tokens=7, keep_logits=keep))
        first = torch.autograd.grad(total.sum(), (x, weight), retain_graph=True)
        second = torch.autograd.grad(total.sum(), (x, weight))
        assert all(map(torch.equal, first, second))


def test_autocast_computes_in_its_dtype() -> None:
    x, weight, bias, targets, _ = _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_losses(x, weight, bias, targets, _head(chunk_tokens=7))
        expected = F.cross_entropy(
            F.linear(x, weight, bias).float().flatten(0, 1), targets.flatten(), reduction="none"
        )
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-6, atol=1e-6)
    for grad in torch.autograd.grad(losses.sum(), (x, weight, bias)):
        assert grad.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, 127, 1000, 4096, 8193])
@pytest.mark.parametrize("hidden", [8, 256, 4096])
def test_chunks_cover_the_tokens_evenly(tokens: int, hidden: int) -> None:
    length = chunk_tokens(tokens, hidden)
    assert 1 <= length <= max(128, hidden // 2)
    assert length <= max(16, -(-tokens // 4))
    num_chunks = -(-tokens // length)
    assert tokens - (num_chunks - 1) * length > length // 2 or num_chunks == 1


# -------------------------------------------------------------------------------------------- model


def _model(**options: Any) -> GPTModel:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    sizes["max_sequence_length"] = 64
    return GPTModel(tiny_config(**sizes, **options))


def _grads(losses: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    (losses.mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("vocabulary", [60, 500], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_models_losses_equal_those_of_its_logits(vocabulary: int, tied: bool) -> None:
    options = {"vocab_size": vocabulary, "share_embeddings_and_output_weights": tied}
    model = _model(**options, label_smoothing=0.1, z_loss=1e-3)
    tokens = torch.randint(vocabulary, (2, 40), generator=torch.Generator().manual_seed(0))
    losses = model(tokens, labels=tokens)
    grads = _grads(losses, model)
    expected = model.loss(model(tokens), tokens)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for name, want in _grads(expected, model).items():
        assert (grads[name] - want).norm() <= 1e-6 * want.norm(), name


def test_a_loss_of_ones_own_gets_the_logits() -> None:
    """Also a layer of one's own, such as one with adapters, is called as before."""
    model = _model(vocab_size=500)
    tokens = torch.randint(500, (2, 40))
    expected = model(tokens, labels=tokens)

    class Own(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return CrossEntropy()(logits, targets)

    class Around(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    own, layer = Own(), model.output_layer
    model.loss = own
    torch.testing.assert_close(model(tokens, labels=tokens), expected, rtol=1e-6, atol=1e-6)
    model.loss, model.output_layer = CrossEntropy(), Around(layer)
    torch.testing.assert_close(model(tokens, labels=tokens), expected, rtol=1e-6, atol=1e-6)


def test_hooks_of_the_output_layer_run() -> None:
    model, seen = _model(vocab_size=500), []
    model.output_layer.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    model(torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long))
    assert seen == [(8, 1)]


def _peak(step: Any) -> int:
    with LiveBytes() as counter:
        step()
    return counter.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, 512])
def test_the_peak_of_a_large_vocabulary_falls_by_more_than_the_logits(tokens: int) -> None:
    vocabulary, hidden = 128 * 1024, 8
    layer, loss = OutputLinear(hidden, vocabulary, bias=False), CrossEntropy()
    x, targets = torch.randn(tokens, hidden, requires_grad=True), torch.zeros(tokens).long()
    logits_bytes = 4 * tokens * vocabulary
    before = _peak(lambda: loss(layer(x), targets).mean().backward())
    after = _peak(lambda: layer(x, targets, loss).mean().backward())
    assert before >= 3 * logits_bytes
    assert after <= before - 2 * logits_bytes
    # A chunk's logits and the softmax of them, beside the weight's gradient.
    chunk = chunk_tokens(tokens, hidden)
    assert after <= 2.1 * 4 * chunk * vocabulary + 2 * 4 * vocabulary * hidden


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["alone", "first", "last"])
@pytest.mark.parametrize(
    ("softcap", "temperature"), [(None, 1.0), (3.0, 1.0), (3.0, 0.6), (None, 0.6)]
)
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)], ids=["plain", "smoothed"])
def test_kernels_to_compile_equal_the_uncompiled_arithmetic(
    smoothing: float, z: float, softcap: float | None, temperature: float, rank: int | None
) -> None:
    """As written: inductor makes one kernel of each on a GPU."""
    group = ALONE if rank is None else AxisGroup("tp", (0, 1), rank, None)
    vocabulary = Vocabulary(group, VOCABULARY, -100, smoothing, z, softcap, temperature)
    draw = torch.Generator().manual_seed(2)
    num_rows = shard_range(VOCABULARY, group.size, group.rank)[1]
    logits = 3.0 * torch.randn(TOKENS, num_rows, generator=draw, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    targets[5] = -100
    local, grad = vocabulary.targets(targets, num_rows), torch.rand(TOKENS, generator=draw)
    for dtype in (torch.float32, torch.float64):
        rows, grad = logits.to(dtype), grad.to(dtype)
        terms = vocabulary.terms(rows, local.ids)
        torch.testing.assert_close(
            loss_terms(rows, local.ids, bool(smoothing), softcap, temperature), terms
        )
        normalizer = terms[0] + 0.3  # with the other rank's logits
        factors = vocabulary.factors(grad, local, terms[0], normalizer)
        torch.testing.assert_close(
            loss_gradient(rows, local.ids, terms[0], factors, softcap, temperature),
            vocabulary.logits_grad(grad, rows, local, terms[0], normalizer),
        )


def test_terms_of_large_logits_are_as_exact_as_of_small_logits() -> None:
    """fp32 has steps of 1e-3 at 1e4. Terms are differences, and have the steps of differences."""
    draw = torch.Generator().manual_seed(2)
    logits = 1e4 + 3.0 * torch.randn(TOKENS, VOCABULARY, generator=draw)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    terms = loss_terms(logits, ids, True, None)
    log_p = logits.double().log_softmax(-1)
    picked = log_p.gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(terms[1].double(), picked, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms[2].double(), log_p.sum(-1), rtol=1e-6, atol=1e-6)
