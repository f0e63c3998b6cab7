"""A split backward gives the gradients of a whole one, bit by bit, and runs nothing twice."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.layers.split_backward import SplitLinear, join_backwards, split_backwards
from megatron_lightning.pipeline.weight_gradients import WeightGradients


class _Counting(torch.autograd.Function):
    """An identity that counts its calls, as a custom function or a collective would be counted."""

    calls: list[str]

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, calls: list[str]) -> Tensor:
        ctx.calls = calls
        calls.append("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.calls.append("backward")
        return grad, None


class _Block(nn.Module):
    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.second = nn.Linear(16, 8, bias=False)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.recompute, self.calls = recompute, list[str]()

    def _inner(self, x: Tensor) -> Tensor:
        x = _Counting.apply(self.norm(self.first(x)).relu(), self.calls)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.normed(self.second(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.recompute == "none":
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self.recompute == "reentrant")


def _gradients(split: bool, recompute: str, autocast: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
    block, ledger = _Block(recompute).to(dtype), WeightGradients()
    for parameter in block.parameters():  # as the buckets do: fp32 sums of bf16 gradients
        parameter.grad_dtype = None
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    if split:
        split_backwards(block, ledger)
    losses = []
    for microbatch in range(3):
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(microbatch))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(block(tokens).float().square().mean())
    for microbatch, loss in enumerate(losses):
        if not split:
            loss.backward()
            continue
        with ledger.collect((0, microbatch)):
            loss.backward()
        assert not block.second.weight.grad.any() or microbatch
    if split:
        for microbatch in range(3):
            ledger.compute((0, microbatch))
    return {name: parameter.grad for name, parameter in block.named_parameters()}, block.calls


@pytest.mark.parametrize("recompute", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_halves_equal_the_whole(recompute: str, autocast: bool, dtype: torch.dtype) -> None:
    """Bit-equal in fp32, under autocast and with bf16 weights, whose gradients are summed in fp32."""
    expected, whole_calls = _gradients(False, recompute, autocast, dtype)
    actual, calls = _gradients(True, recompute, autocast, dtype)
    assert calls == whole_calls  # nothing custom ran more often
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32 and gradient.any(), name
        assert torch.equal(gradient, expected[name]), name


def test_what_is_split_is_told_and_undone() -> None:
    block, ledger = _Block(), WeightGradients()
    split, whole = split_backwards(block, ledger)
    assert split == ["first", "second"]  # weight norm makes a class of its own, and computes its weight from others
    assert whole == ["attention", "attention.out_proj", "normed.parametrizations.weight"]
    assert type(block.first) is SplitLinear and block.first.weight_gradients is ledger
    join_backwards(block)
    assert type(block.first) is nn.Linear and not hasattr(block.first, "weight_gradients")


def test_hooks_fire_when_the_gradient_is_there() -> None:
    linear, ledger, events = nn.Linear(4, 4), WeightGradients(), list[str]()
    split_backwards(linear, ledger)
    for name, parameter in linear.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    with ledger.collect((0, 0)):
        linear(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert events == ["bias"] and linear.weight.grad is None
    ledger.compute((0, 0))
    assert events == ["bias", "weight"]


def test_activations_are_let_go_with_their_product() -> None:
    linear, ledger = nn.Linear(4, 4), WeightGradients()
    split_backwards(linear, ledger)
    x = torch.ones(2, 4, requires_grad=True)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    with ledger.collect((0, 0)):
        linear(x).sum().backward()
    del x
    assert not storage.expired()
    ledger.compute((0, 0))
    assert storage.expired()


def test_without_a_schedule_the_gradient_is_there_at_once() -> None:
    linear, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(linear.state_dict())
    split_backwards(linear, WeightGradients())
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)):
        for module in (linear, plain):
            module.zero_grad()
            module(x).square().sum().backward()
        assert torch.equal(linear.weight.grad, plain.weight.grad) and torch.equal(linear.bias.grad, plain.bias.grad)
