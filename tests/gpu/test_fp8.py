"""Native FP8 products on a GPU against the emulation; skipped where there is none that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from megatron_lightning.precision.backends import choose_backend
from megatron_lightning.precision.delayed_scaling import advance
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.native import NativeGemm, find_gpu
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RECIPES: dict[str, FP8Recipe] = {
    "current": FP8Recipe(scaling="current"),
    "current, hybrid": FP8Recipe(scaling="current", format="hybrid"),
    "delayed, hybrid": FP8Recipe(scaling="delayed", format="hybrid"),
    "rowwise": FP8Recipe(scaling="rowwise"),
    "blockwise": FP8Recipe(scaling="blockwise"),
}
# Tokens, input and output features: whole tiles, ragged ones, and few tokens.
SIZES = [(4096, 1024, 2048), (200, 300, 140), (17, 64, 48)]
# Relative errors of a product. Both backends round to bf16: 2^-9 / sqrt(3) each. Forward, Hopper
# adds up with 14 bits, in an order of its own. A wrong scale or layout gives 0.1 or more.
GRADIENT, FORWARD = 5e-3, 2e-2


@pytest.fixture(params=RECIPES)
def recipe(request: Any) -> FP8Recipe:
    """A recipe that this GPU can run."""
    found = RECIPES[request.param]
    if choose_backend("auto", found, find_gpu()) != "native":
        pytest.skip(f"{torch.cuda.get_device_name()} has no products of {request.param}")
    return found


def _matrices(tokens: int, size_in: int, size_out: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (tokens, size_in), (size_out, size_in), (tokens, size_out)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _experts(counts: list[int], size_in: int, size_out: int) -> list[Tensor]:
    x, _, dy = _matrices(sum(counts), size_in, size_out)
    return [x, torch.randn(len(counts), size_out, size_in, device="cuda", dtype=x.dtype), dy]


def _products(inputs: list[Tensor], gemm: Gemm, counts: Tensor | None = None) -> list[Tensor]:
    *leaves, dy = (x.clone().requires_grad_() for x in inputs)
    y = matmul(*leaves, None, gemm, counts=counts)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _gemms(recipe: FP8Recipe, inputs: list[Tensor], counts: Tensor | None = None) -> list[Gemm]:
    """Return both backends' products, with histories where the recipe has them."""
    gemms = [EmulatedGemm(recipe), NativeGemm(recipe)]
    for gemm in gemms:
        _products(inputs, gemm, counts)
        advance(list(gemm.histories.values()), None)
    return [*gemms]


def _assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for own, other, bound in zip(actual, expected, (FORWARD, GRADIENT, GRADIENT), strict=True):
        assert own.shape == other.shape and own.dtype == torch.bfloat16
        error = (own.float() - other.float()).norm() / other.float().norm()
        assert error <= bound


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_equal_the_emulation(recipe: FP8Recipe, sizes: tuple[int, int, int]) -> None:
    inputs = _matrices(*sizes)
    emulated, native = _gemms(recipe, inputs)
    _assert_close(_products(inputs, native), _products(inputs, emulated))


@pytest.mark.parametrize("counts", [[256, 128, 384, 128], [3, 0, 200, 17]], ids=str)
def test_experts_equal_the_emulation(recipe: FP8Recipe, counts: list[int]) -> None:
    inputs, on_gpu = _experts(counts, 256, 384), torch.tensor(counts, device="cuda")
    emulated, native = _gemms(recipe, inputs, on_gpu)
    actual, expected = (_products(inputs, gemm, on_gpu) for gemm in (native, emulated))
    _assert_close(actual, expected)
    for gradient, count in zip(actual[2], counts, strict=True):
        assert count or not gradient.any()


@contextmanager
def _no_wait() -> Iterator[None]:
    """Fail where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("grouped", [False, True])
def test_the_host_waits_for_nothing(recipe: FP8Recipe, grouped: bool) -> None:
    """But for experts without a kernel: blocks, e5m2, and GPUs other than Hopper's."""
    e4m3_rows = recipe.scaling != "blockwise" and recipe.format == "e4m3"
    if grouped and not (e4m3_rows and torch.cuda.get_device_capability()[0] == 9):
        pytest.skip("experts are multiplied one by one")
    counts = torch.tensor([128, 0, 64, 64], device="cuda") if grouped else None
    inputs = _experts([128, 0, 64, 64], 256, 384) if grouped else _matrices(256, 128, 384)
    _, native = _gemms(recipe, inputs, counts)
    with _no_wait():
        _products(inputs, native, counts)


def _layer(recipe: FP8Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.GELU()).cuda()
    if recipe is not None:
        apply_recipe(block, recipe, backend="native")
    return block


def _gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


def _num_kernels(layer: nn.Module, x: Tensor) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _gradients(layer, x)
        torch.cuda.synchronize()
    return len([event for event in profile.events() if "Mem" not in event.name])


def test_casts_are_fused_when_compiled(recipe: FP8Recipe) -> None:
    """Into kernels of norm and activation: about half as many as uncompiled (110 of 211 with
    delayed scales), and as near to a layer in bf16. Fused norms are not rounded to bf16 before the
    cast, so that a code may be the neighbor. In sums over all rows the roundings average out: below
    1 %, whichever is nearer.
    """
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    plain, compiled, exact = _layer(recipe), _layer(recipe), _layer(None)
    compiled.compile()
    found = zip(*(_gradients(layer, x) for layer in (compiled, plain, exact)), strict=True)
    for own, other, full in (tuple(map(Tensor.float, values)) for values in found):
        limit = max(1.1 * float((other - full).norm()), 1e-2 * float(full.norm()))
        assert (own - full).norm() <= limit <= 0.1 * full.norm()
    assert _num_kernels(compiled, x) * 1.8 < _num_kernels(plain, x)


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.losses.append(float(arguments[2]["loss"]))


def _trained(recipe: FP8Recipe, backend: Any) -> list[float]:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, vocab_size=96,
        max_sequence_length=32, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    module = GPTLightningModule(config, learning_rate=1e-3)
    module.configure_model()
    tokens = torch.randint(0, 96, (8 * 10, 33), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    recorder, plugin = _Losses(), MegatronFP8Precision(recipe, backend)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, plugins=[plugin], callbacks=[recorder], max_epochs=1,
        strategy=MegatronStrategy(micro_batch_size=4), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=8))
    assert plugin.backend == ("emulation" if backend == "emulation" else "native")
    return recorder.losses


def test_a_training_follows_the_emulation(recipe: FP8Recipe) -> None:
    """10 steps: a product that is rounded to another bf16 moves a code by 1/16 at times, which
    training averages out."""
    native = _trained(recipe, "auto")
    assert native == pytest.approx(_trained(recipe, "emulation"), rel=1e-2)
