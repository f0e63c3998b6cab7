"""Products with weights: grouped ones against a loop, those of layers bit-equal to torch's own, and
a quantizing gemm through every layer."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lightning.compat import adds_in_fp32, takes_grouped_mm
from megatron_lightning.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lightning.layers.linear import gemm
from megatron_lightning.layers.linear.gemm import Gemm, Operand, Role, matmul
from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.layers.linear.splittable import Splittable, linear
from megatron_lightning.layers.linear.transposed import TransposedColumnParallelLinear
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from tests.helpers.ranks import run_ranks

COUNTS = {
    "uneven": [3, 1, 5, 2],
    "empty": [0, 4, 0, 7],
    "everything": [0, 0, 11, 0],
    "no-tokens": [0, 0, 0, 0],
}
# Sums in another order: fp32 rounds by 6e-8, bf16 by 4e-3.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}


class _Function(Gemm):
    """Torch's products, with our gradients instead of autograd's."""

    differentiable = False


class _Coded(Gemm):
    """Codes in fp16 and scales, exact for small integers. Scales of inputs have dims; those of an
    operand for a second product are negative, where one does not serve both."""

    differentiable = False

    def __init__(self, two_sided: bool) -> None:
        self.two_sided = two_sided

    def operand(
        self,
        tensor: Tensor,
        role: Role,
        *,
        transposed: bool = False,
        counts: Tensor | None = None,
    ) -> Operand:
        scale = -0.5 if transposed and not self.two_sided else 2.0
        codes = (tensor / scale).half()
        shape = (*tensor.shape[:-1], 1) if role == "input" else ()
        return Operand(codes, tensor.new_full(shape, scale))

    def _values(self, operand: Operand, second: bool) -> Operand:
        data, scales = operand
        assert scales is not None and data.dtype == torch.float16
        assert (scales.numel() == 0) or self.two_sided or bool((scales < 0).all()) == second
        return Operand(data.float() * scales)

    def forward(self, x: Operand, weight: Operand, *rest: Any) -> Tensor:
        return super().forward(self._values(x, False), self._values(weight, False), *rest)

    def input_grad(self, grad: Operand, weight: Operand, *rest: Any) -> Tensor:
        return super().input_grad(self._values(grad, False), self._values(weight, True), *rest)

    def weight_grad(self, grad: Operand, x: Operand, *rest: Any) -> Tensor:
        return super().weight_grad(self._values(grad, True), self._values(x, True), *rest)


def _integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def _gradients(y: Tensor, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return y, *torch.autograd.grad(y, inputs, grad)


# ------------------------------------------------------------------------------------------ grouped


def _loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = [part @ w.t() for part, w in zip(x.split(counts), weight, strict=True)]
    return torch.cat(parts) + 0.0 * weight.sum()  # an expert without tokens has a gradient, zero


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(24, 16), (5, 7)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_products_equal_a_loop(
    dtype: torch.dtype, shape: tuple[int, int], counts: list[int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), shape[1], dtype=dtype, requires_grad=True)
    weight = torch.randn(4, *shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(sum(counts), shape[0], dtype=dtype)
    assert takes_grouped_mm(weight) == (shape == (24, 16) and dtype != torch.float64)
    y = matmul(x, weight, None, Gemm(), counts=torch.tensor(counts))
    actual = _gradients(y, grad, x, weight)
    expected = _gradients(_loop(x, weight, counts), grad, x, weight)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_torch_multiplies_groups_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel gives what the loop gives, and is called for all three products."""
    torch.manual_seed(0)
    x, weight = torch.randn(11, 16, requires_grad=True), torch.randn(4, 24, 16, requires_grad=True)
    counts, grad = torch.tensor(COUNTS["empty"]), torch.randn(11, 24)
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
        fused = _gradients(matmul(x, weight, None, Gemm(), counts=counts), grad, x, weight)
        assert kernel.call_count == 3
        monkeypatch.setattr(gemm, "takes_grouped_mm", lambda x: False)
        looped = _gradients(matmul(x, weight, None, Gemm(), counts=counts), grad, x, weight)
        assert kernel.call_count == 3
    torch.testing.assert_close(fused, looped, rtol=1e-6, atol=1e-6)


def test_experts_are_multiplied_one_by_one_if_asked() -> None:
    """``MoEConfig(grouped_gemm=False)``."""
    torch.manual_seed(0)
    experts = GroupedLinear(4, 16, 24, bias=False, one_by_one=True)
    rows, counts = torch.randn(11, 16, requires_grad=True), torch.tensor(COUNTS["empty"])
    grad = torch.randn(11, 24)
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
        found = _gradients(experts(rows, counts), grad, rows, experts.weight)
        assert not kernel.called
    expected = _gradients(_loop(rows, experts.weight, counts.tolist()), grad, rows, experts.weight)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(7, 3), (5, 3), 5]
    )
    stacked, counts = torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([2, 0, 4, 1])
    stacked.requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: matmul(*t, _Function()), (x, weight, bias))
    assert torch.autograd.gradcheck(
        lambda *t: matmul(*t, None, Gemm(), counts=counts), (x, stacked)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_are_traced(dtype: torch.dtype) -> None:
    """The shape of the result needs no counts, in a fake run and in a compiled graph."""
    x, weight = torch.randn(11, 16, dtype=dtype), torch.randn(4, 24, 16, dtype=dtype)
    counts = torch.tensor(COUNTS["uneven"])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, weight, counts)]
        fake[1].requires_grad_()
        y = matmul(fake[0], fake[1], None, Gemm(), counts=fake[2])
        y.sum().backward()
        assert y.shape == (11, 24) and fake[1].grad is not None

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x, weight, None, Gemm(), counts=counts).square()

    inputs = [tensor.requires_grad_() for tensor in (x, weight)]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    grad = torch.ones(11, 24, dtype=dtype)
    for actual, expected in zip(
        _gradients(compiled(*inputs), grad, *inputs),
        _gradients(run(*inputs), grad, *inputs),
        strict=True,
    ):
        assert torch.equal(actual, expected)


class _Experts(Splittable, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 24, 16))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return linear(x, self, None, counts=counts)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_grouped_weight_gradients_can_be_deferred(backend: str | None) -> None:
    torch.manual_seed(0)
    experts, store, counts = _Experts(), WeightGradients(), torch.tensor(COUNTS["empty"])
    x, grad = torch.randn(11, 16, requires_grad=True), torch.randn(11, 24)
    (expected,) = torch.autograd.grad(experts(x, counts), experts.weight, grad)
    assert split_backwards(experts, store) == ([""], [])
    if backend is not None:
        experts.compile(backend=backend, fullgraph=True)
    y = experts(x, counts)
    with store.collect((0, 0)):
        y.backward(grad)
    assert experts.weight.grad is None and x.grad is not None
    store.compute((0, 0))
    assert torch.equal(experts.weight.grad, expected)


# ----------------------------------------------------------------------------- equal to torch's own


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("shape", [(6,), (3, 6), (4, 3, 6)], ids=str)
def test_products_are_those_of_autograd_bit_by_bit(
    shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(size, dtype=dtype, requires_grad=True)
        for size in (shape, (5, 6), (5,), (*shape[:-1], 5))
    )
    results = []
    for kind in (Gemm(), _Function()):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = matmul(x, weight, bias, kind)
        results.append(_gradients(y, grad.detach().to(y.dtype), x, weight, bias))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = F.linear(x, weight, bias)
    results.append(_gradients(y, grad.detach().to(y.dtype), x, weight, bias))
    for actual in results[:2]:
        assert all(torch.equal(a, b) for a, b in zip(actual, results[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transposed_layers_multiply_as_before(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = nn.Module()
    source.weight = nn.Parameter(torch.randn(6, 5, dtype=dtype))
    layer = TransposedColumnParallelLinear.from_layer(
        source, group=ParallelContext(ParallelLayout()).tp
    )
    x = torch.randn(4, 3, 6, dtype=dtype, requires_grad=True)
    grad = torch.randn(4, 3, 5, dtype=dtype)
    actual = _gradients(layer(x), grad, x, layer.weight)
    expected = _gradients(x @ layer.weight, grad, x, layer.weight)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# -------------------------------------------------------------------------------- quantizing layers


def _saved(kind: Gemm, trained: bool) -> list[tuple[int, ...]]:
    """Return the shapes of what a product saves for backward."""
    shapes = list[tuple[int, ...]]()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(tuple(x.shape)), lambda x: x
    )
    weight = torch.ones(5, 6, requires_grad=trained)
    with hooks:
        matmul(torch.ones(2, 3, 6, requires_grad=True), weight, None, kind)
    return shapes


@pytest.mark.parametrize("two_sided", [True, False])
def test_the_input_of_a_frozen_weight_is_not_kept(two_sided: bool) -> None:
    assert _saved(_Coded(two_sided), True) == [(2, 3, 6), (2, 3, 1), (5, 6)]
    assert _saved(_Coded(two_sided), False) == [(5, 6)]


@pytest.mark.spread(2)
@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_codes_and_scales_can_be_deferred(backend: str | None, two_sided: bool) -> None:
    torch.manual_seed(0)
    layer, store = AdaptableLinear(6, 5), WeightGradients()
    layer.weight.data = _integers(5, 6)
    layer.gemm = _Coded(two_sided)
    x, grad = _integers(4, 3, 6).requires_grad_(), _integers(4, 3, 5)
    (expected,) = torch.autograd.grad(F.linear(x, layer.weight), layer.weight, grad)
    split_backwards(layer, store)
    with patch.object(_Coded, "_values", _values_without_check):
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
        y = layer(x)
        with store.collect((0, 0)):
            y.backward(grad)
        store.compute((0, 0))
    assert torch.equal(layer.weight.grad, expected)


def _values_without_check(gemm: Gemm, operand: Operand, second: bool) -> Operand:
    """Read values of a scale in a graph, which cannot branch on them."""
    assert operand.scales is not None
    return Operand(operand.data.float() * operand.scales)


def _quantized_layers(two_sided: bool, deferred: bool, gathers_again: bool) -> None:
    """Compare two layers on sequence shards with plain ones; whatever is gathered is codes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6, bias=False))
    for parameter in plain.parameters():
        parameter.data = _integers(*parameter.shape)
    layout = ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=True)
    context = ParallelContext(layout)
    options: dict[str, Any] = {"group": context.tp, "sequence_parallel": True}
    layers = nn.Sequential(
        ColumnParallelLinear.from_linear(deepcopy(plain[0]), **options),
        RowParallelLinear.from_linear(deepcopy(plain[1]), **options),
    )
    for layer in layers:
        layer.gemm = _Coded(two_sided)
    store = WeightGradients()
    if deferred:
        split_backwards(layers, store)
    x, grad = _integers(4, 3, 6).requires_grad_(), _integers(4, 3, 6)
    plain(x).backward(grad)
    shard = x.detach().chunk(2)[dist.get_rank()].requires_grad_()

    start, sent = gemm.all_gather_start, list[Tensor]()
    with (
        patch.object(gemm, "all_gather_start", lambda t, *a: sent.append(t) or start(t, *a)),
        patch(
            "megatron_lightning.layers.linear.column_gemm.keeps_shard", return_value=gathers_again
        ),
    ):
        y = layers(shard)
        with store.collect((0, 0)):
            y.backward(grad.chunk(2)[dist.get_rank()])
        store.compute((0, 0))

    rank = dist.get_rank()
    assert torch.equal(y, plain(x).chunk(2)[rank])
    assert torch.equal(shard.grad, x.grad.chunk(2)[rank])
    for name, parameter in layers.named_parameters():
        spec = layers.get_submodule(name.split(".")[0]).shard_specs[name.split(".")[1]]
        assert torch.equal(parameter.grad, spec.shard(plain.get_parameter(name).grad)), name
    assert all(t.dtype == torch.float16 or t.shape[-1] == 1 for t in sent)
    again = 1 if gathers_again or not two_sided else 0
    assert sum(t.dtype == torch.float16 for t in sent) == 1 + again + (1 if two_sided else 2)


@pytest.mark.parametrize("two_sided", [True, False], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize(
    ("deferred", "gathers_again"),
    [(False, False), (False, True), (True, True)],
    ids=["keeps-full", "keeps-shard", "deferred"],
)
def test_layers_gather_what_a_gemm_made(
    two_sided: bool, deferred: bool, gathers_again: bool
) -> None:
    run_ranks(2, _quantized_layers, two_sided, deferred, gathers_again)


@pytest.mark.parametrize(("hip", "expected"), [(None, True), ("7.2", False)])
def test_products_of_16_bits_in_fp32_are_of_cuda(
    hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of ROCm are of the type cuda as well."""
    monkeypatch.setattr(torch.version, "hip", hip)
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert adds_in_fp32(x) == expected
