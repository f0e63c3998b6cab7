"""A split backward gives the gradients of a whole one, bit by bit, and runs nothing twice."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.linear.split_backward import join_backwards, split_backwards
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from tests.helpers.ranks import run_ranks


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


def _gradients(
    split: bool, recompute: str, autocast: bool, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[str]]:
    block, store = _Block(recompute).to(dtype), WeightGradients()
    for parameter in block.parameters():  # as the buckets do: fp32 sums of bf16 gradients
        parameter.grad_dtype = None
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    if split:
        split_backwards(block, store)
    losses = []
    for microbatch in range(3):
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(microbatch))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(block(tokens).float().square().mean())
    for microbatch, loss in enumerate(losses):
        if not split:
            loss.backward()
            continue
        with store.collect((0, microbatch)):
            loss.backward()
        assert not block.second.weight.grad.any() or microbatch
    if split:
        for microbatch in range(3):
            store.compute((0, microbatch))
    return {name: parameter.grad for name, parameter in block.named_parameters()}, block.calls


@pytest.mark.parametrize("recompute", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    ("autocast", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
)
def test_halves_equal_the_whole(recompute: str, autocast: bool, dtype: torch.dtype) -> None:
    """Bit-equal in fp32, under autocast and with bf16 weights, whose gradients are summed in
    fp32."""
    expected, whole_calls = _gradients(False, recompute, autocast, dtype)
    actual, calls = _gradients(True, recompute, autocast, dtype)
    assert calls == whole_calls  # nothing custom ran more often
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32 and gradient.any(), name
        assert torch.equal(gradient, expected[name]), name


class _Plain(nn.Module):
    """Function that torch.compile takes as one graph."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 8, bias=False),
        )
        self.recompute = recompute

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) if self.recompute else self._inner(x)


def _blocks(
    backend: str | None, recompute: str, autocast: bool
) -> tuple[list[Tensor], list[list[str]]]:
    """Train three blocks of one shape on two micro-batches; without a backend nothing is split."""
    torch.manual_seed(0)
    blocks, store = (
        nn.ModuleList([_Plain(recompute == "inside") for _ in range(3)]),
        WeightGradients(),
    )
    fired = list[str]()
    for name, parameter in blocks.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    if backend is not None:
        split_backwards(blocks, store)
        for block in blocks:
            block.compile(backend=backend, fullgraph=True)
    losses, events = [], []
    for microbatch in range(2):
        x = torch.randn(
            2, 3, 8, generator=torch.Generator().manual_seed(microbatch), requires_grad=True
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for block in blocks:
                x = (
                    checkpoint(block, x, use_reentrant=False)
                    if recompute == "outside"
                    else block(x)
                )
        losses.append(x.float().square().mean())
    for microbatch, loss in enumerate(losses):
        with store.collect((0, microbatch)):
            loss.backward()
    events.append(sorted(fired))
    for parameter in blocks.parameters():  # memory that a compiled graph took note of before
        parameter.data = parameter.data.clone()
    for microbatch in range(2):
        store.compute((0, microbatch))
    events.append(sorted(fired))
    return [parameter.grad for parameter in blocks.parameters()], events


def _check_compiled(backend: str, recompute: str, autocast: bool, tolerance: float) -> None:
    torch._dynamo.reset()
    expected, (everything, _) = _blocks(None, recompute, autocast)
    torch._dynamo.utils.counters.clear()
    actual, (first, all_) = _blocks(backend, recompute, autocast)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # shared by the blocks
    weights = ("first.weight", "second.weight")
    assert (
        first == [name for name in everything if not name.endswith(weights)] and all_ == everything
    )
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("recompute", "autocast"), [("none", False), ("inside", True), ("outside", False)]
)
def test_compiled_blocks_defer(recompute: str, autocast: bool) -> None:
    """Bit-equal to whole backwards of uncompiled blocks; hooks of a parameter fire when its
    gradient is there."""
    _check_compiled("aot_eager", recompute, autocast, 0.0)


@pytest.mark.slow  # inductor compiles C++
@pytest.mark.timeout(420)
@pytest.mark.parametrize("recompute", ["none", "inside", "outside"])
def test_blocks_compiled_by_inductor_defer(recompute: str) -> None:
    """Its kernels sum in another order: some units in the last place of fp32."""
    run_ranks(1, _check_compiled, "inductor", recompute, False, 1e-6, timeout_s=400)


def test_a_compiled_layer_without_a_schedule() -> None:
    """Its gradient is there at once, and follows when the parameter's memory is another."""
    linear, plain, store = nn.Linear(4, 4), nn.Linear(4, 4), WeightGradients()
    plain.load_state_dict(linear.state_dict())
    split_backwards(linear, store)
    linear.compile(backend="aot_eager", fullgraph=True)
    for scale in (1.0, 2.0):
        for module in (linear, plain):
            module.zero_grad()
            module.weight.data = module.weight.data * scale
            store.begin()
            module(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
        assert torch.equal(linear.weight.grad, plain.weight.grad) and torch.equal(
            linear.bias.grad, plain.bias.grad
        )
    assert (
        copy.deepcopy(linear).hidden_weight is None
        and pickle.loads(pickle.dumps(linear)).hidden_weight is None
    )


def test_what_is_split_is_told_and_undone() -> None:
    block, store = _Block(), WeightGradients()
    split, whole = split_backwards(block, store)
    # Weight norm makes a class of its own, and computes its weight from others.
    assert split == ["first", "second"]
    assert whole == ["attention", "attention.out_proj", "normed.parametrizations.weight"]
    assert type(block.first) is AdaptableLinear and block.first.hidden_weight.store is store
    join_backwards(block)
    assert type(block.first) is nn.Linear and not hasattr(block.first, "hidden_weight")


def test_hooks_fire_when_the_gradient_is_there() -> None:
    linear, store, events = nn.Linear(4, 4), WeightGradients(), list[str]()
    split_backwards(linear, store)
    for name, parameter in linear.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    with store.collect((0, 0)):
        linear(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert events == ["bias"] and linear.weight.grad is None
    store.compute((0, 0))
    assert events == ["bias", "weight"]


def test_activations_are_let_go_with_their_product() -> None:
    linear, store = nn.Linear(4, 4), WeightGradients()
    split_backwards(linear, store)
    x = torch.ones(2, 4, requires_grad=True)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    with store.collect((0, 0)):
        linear(x).sum().backward()
    del x
    assert not storage.expired()
    store.compute((0, 0))
    assert storage.expired()


def test_without_a_schedule_the_gradient_is_there_at_once() -> None:
    linear, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(linear.state_dict())
    split_backwards(linear, WeightGradients())
    for x in (
        torch.ones(2, 4),
        torch.ones(2, 4, requires_grad=True),
        torch.ones(4, requires_grad=True),
    ):
        for module in (linear, plain):
            module.zero_grad()
            module(x).square().sum().backward()
        assert torch.equal(linear.weight.grad, plain.weight.grad) and torch.equal(
            linear.bias.grad, plain.bias.grad
        )
