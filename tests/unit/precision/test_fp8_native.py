"""Products by torch's scaled kernels against the emulation: those of tensors and rows on the CPU's
kernels, those of blocks and experts on stand-ins; what GPUs can run, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import matmul
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe, remove_recipe
from megatron_lightning.precision.backends import Gpu, choose_backend
from megatron_lightning.precision.delayed_scaling import advance
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.native import NativeGemm
from megatron_lightning.precision.scaled_gemms import pad
from tests.helpers.scaled_kernels import multiplies_rows, stand_ins
from tests.unit.precision.test_fp8_gemm import COUNTS, _matrices, _products

RECIPES: dict[str, FP8Recipe] = {
    "current": FP8Recipe(scaling="current"),
    "hybrid": FP8Recipe(scaling="current", format="hybrid"),
    "delayed": FP8Recipe(scaling="delayed", format="hybrid"),
    "rowwise": FP8Recipe(scaling="rowwise"),
    "blockwise": FP8Recipe(scaling="blockwise"),
    "blockwise, any scales": FP8Recipe(scaling="blockwise", power_of_two_scales=False),
}
# Tokens, input and output features: whole blocks, ragged ones, and less than one; 16 divides one.
SIZES = [(256, 128, 384), (200, 300, 140), (40, 70, 50), (1, 32, 16)]


def _gemms(name: str, dtype: torch.dtype = torch.float32) -> tuple[EmulatedGemm, NativeGemm]:
    """Return both backends' products, with histories where the recipe has them."""
    gemms = EmulatedGemm(RECIPES[name], dtype=dtype), NativeGemm(RECIPES[name], dtype=dtype)
    for gemm in gemms:
        _products(*_matrices(), gemm)
        advance(list(gemm.histories.values()), None)
    return gemms


def _assert_equal_up_to_sums(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Codes and scales are equal; sums in fp32 are in another order, and scales are applied to them
    instead of the values: a few units of the last of 24 bits."""
    for own, other in zip(actual, expected, strict=True):
        assert own.shape == other.shape and own.dtype == other.dtype and own.is_contiguous()
        scale = float(other.abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.spread(6)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_products_equal_the_emulation(name: str, sizes: tuple[int, int, int]) -> None:
    with stand_ins() as calls:
        emulated, native = _gemms(name)
        calls.clear()
        actual = _products(*_matrices(*sizes), native)
    assert calls == ["scaled_mm" if "blockwise" in name else "_scaled_mm"] * 3
    _assert_equal_up_to_sums(actual, _products(*_matrices(*sizes), emulated))


@pytest.mark.parametrize("name", RECIPES)
def test_results_in_bf16_are_rounded_once(name: str) -> None:
    """Inputs [s, b, n] and a bias. One value of 256 may be rounded to the neighbor: of bf16, whose
    neighbors are 1/128 apart; blocks add the bias to rounded values."""
    x, w, _ = _matrices()
    w, bias = w.bfloat16().float(), torch.randn(50)  # as each backend rounds a weight
    with stand_ins():
        results = [
            matmul(x.view(8, 5, 70), w, bias, gemm).float() for gemm in _gemms(name, torch.bfloat16)
        ]
    assert results[0].shape == (8, 5, 50)
    torch.testing.assert_close(*results, rtol=1 / 128, atol=1 / 64)
    if "blockwise" not in name:
        with stand_ins():
            emulated, _ = _gemms(name)
        exact = matmul(x.view(8, 5, 70), w, bias.bfloat16().float(), emulated)
        assert (results[1] != exact.bfloat16().float()).float().mean() <= 1 / 256


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_experts_equal_the_emulation(name: str, counts: list[int]) -> None:
    """By one kernel where torch has it, which takes e4m3 and rows and gives bf16, else one by one;
    an expert without tokens has a gradient of zeros."""
    torch.manual_seed(0)
    x, dy = torch.randn(sum(counts), 70), torch.randn(sum(counts), 50) * 1e-3
    inputs = x, torch.randn(4, 50, 70), dy
    with stand_ins() as calls:
        emulated, native = _gemms(name)
        calls.clear()
        actual = _products(*inputs, native, torch.tensor(counts))
    expected = _products(*inputs, emulated, torch.tensor(counts))
    kernels = {"current": 3, "rowwise": 3, "hybrid": 1, "delayed": 1}.get(name, 0)
    if sum(counts):
        assert calls.count("_scaled_grouped_mm") == kernels
    if not kernels:
        _assert_equal_up_to_sums(actual, expected)
        return
    for own, other in zip(actual, expected, strict=True):
        assert own.shape == other.shape and own.isfinite().all()
        # Rounded to bf16, where sums that differ in their last bits may get neighbors.
        atol = 1e-6 * float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(own, other.bfloat16().float(), rtol=1 / 128, atol=atol)


@pytest.mark.parametrize("name", ["current", "hybrid", "delayed", "rowwise"])
def test_experts_are_multiplied_one_by_one_without_a_kernel_or_if_asked(name: str) -> None:
    if name == "rowwise" and not multiplies_rows():
        pytest.skip("this torch multiplies rows on GPUs alone")
    torch.manual_seed(0)
    counts = torch.tensor(COUNTS[0])
    inputs = torch.randn(40, 70), torch.randn(4, 50, 70), torch.randn(40, 50) * 1e-3
    emulated, native = _gemms(name)
    actual = _products(*inputs, native, counts)
    expected = _products(*inputs, emulated, counts)
    _assert_equal_up_to_sums(actual, expected)
    with stand_ins() as calls:
        _, native = _gemms(name)
        native.one_by_one = True
        calls.clear()
        actual = _products(*inputs, native, counts)
    assert calls and "_scaled_grouped_mm" not in calls
    _assert_equal_up_to_sums(actual, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_an_infinity_shows(name: str) -> None:
    x, w, dy = _matrices()
    x[3, 5] = float("inf")
    with stand_ins():
        emulated, native = _gemms(name)
        actual, expected = _products(x, w, dy, native), _products(x, w, dy, emulated)
    assert actual[0].isnan().any()
    for own, other in zip(actual, expected, strict=True):
        assert torch.equal(own.isnan(), other.isnan())


def test_only_forward_adds_up_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = []
    scaled = torch._scaled_mm

    def record(*args: Any, **options: Any) -> Tensor:
        fast.append(options["use_fast_accum"])
        return scaled(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    _products(*_matrices(), NativeGemm(FP8Recipe(scaling="current")))
    assert fast == [True, False, False]


class _Reads(TorchDispatchMode):
    """Counts values that the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_the_host_waits_for_nothing(name: str) -> None:
    with stand_ins():
        _, native = _gemms(name)
        with _Reads() as reads:
            _products(*_matrices(), native)
    assert reads.count == 0


def test_padding_and_layout() -> None:
    """Strides of dims of size 1 are those that kernels check."""
    x = torch.ones(1, 50, dtype=torch.float8_e4m3fn).t()
    padded = pad(x, 16, 16)
    assert padded.shape == (64, 16) and padded.stride() == (16, 1)
    assert padded.float().sum() == 50 and padded[:50, 0].float().sum() == 50
    assert pad(x, 1, 1).stride() == (1, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_second_operands_are_in_the_layout_of_their_products(name: str) -> None:
    x, w, _ = _matrices(256, 128, 384)
    gemm = NativeGemm(RECIPES[name])
    codes = gemm.operand(w, "weight", transposed=True).data
    assert codes.shape == (384, 128) and codes.stride() == (1, 384)
    if not gemm.two_sided:
        codes = gemm.operand(x.view(64, 4, 128), "input", transposed=True).data
        assert codes.shape == (256, 128) and codes.stride() == (1, 256)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_weight_gradients_are_deferred_and_forwards_recomputed(name: str, recomputed: bool) -> None:
    """Bit-equal to a layer that does neither; one note a micro-batch where there is a history."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 50, bias=False))
    (gemm,) = apply_recipe(model, RECIPES[name], backend="native").quantized.values()
    x, dy, store = torch.randn(40, 70, requires_grad=True), torch.randn(40, 50), WeightGradients()
    leaves = x, model[0].weight
    with stand_ins():
        expected = torch.autograd.grad(model(x).float(), leaves, dy)
        noted = [len(history.take_noted()) for history in gemm.histories.values()]
        split_backwards(model, store)
        y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
        with store.collect((0, 0)):
            y.float().backward(dy)
        store.compute((0, 0))
    assert all(torch.equal(leaf.grad, own) for leaf, own in zip(leaves, expected, strict=True))  # type: ignore[arg-type]
    again = [len(history.take_noted()) for history in gemm.histories.values()]
    assert again == noted == [1] * len(noted)


def test_scales_of_experts_are_not_repeated() -> None:
    """Rows of an expert share the scales of its columns: [E, n], instead of [t, n]."""
    gemm = NativeGemm(FP8Recipe(scaling="rowwise"))
    x, counts = torch.randn(40, 70), torch.tensor(COUNTS[0])
    scales = gemm.operand(x, "input", transposed=True, counts=counts).scales
    assert scales is not None and scales.shape == (4, 70)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "current",
        "delayed",
        "rowwise",
        "blockwise",
    ],
)
def test_layers_are_compiled(name: str) -> None:
    """As one graph, which has the operator of blocks where torch has no CPU kernel to trace."""
    torch.manual_seed(0)
    layer = nn.ModuleList([nn.Linear(64, 48)])
    apply_recipe(layer, RECIPES[name], backend="native")
    assert isinstance(layer[0].gemm, NativeGemm)
    x = torch.randn(4, 64, requires_grad=True)
    inputs = x, layer[0].weight
    with stand_ins() if name == "blockwise" else nullcontext():
        expected = torch.autograd.grad(layer[0](x).float().square().sum(), inputs)
        layer[0].compile(backend="aot_eager", fullgraph=True)
        actual = torch.autograd.grad(layer[0](x).float().square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    remove_recipe(layer)
    assert type(layer[0]) is nn.Linear and "gemm" not in vars(layer[0])


# ----------------------------------------------------------------------------------------- backends

HOPPER = Gpu("NVIDIA H100", (9, 0), (12, 9))
GPUS: dict[str, tuple[Gpu | None, tuple[str, ...]]] = {
    "none": (None, ()),
    "A100": (Gpu("NVIDIA A100", (8, 0), (12, 9)), ()),
    "L40": (Gpu("NVIDIA L40", (8, 9), (12, 9)), ("delayed", "current")),
    "H100": (HOPPER, ("delayed", "current", "rowwise", "blockwise")),
    "H100, CUDA 12.6": (HOPPER._replace(cuda=(12, 6)), ("delayed", "current", "rowwise")),
    "B200": (Gpu("NVIDIA B200", (10, 0), (13, 0)), ("delayed", "current", "rowwise")),
    "MI300X": (Gpu("AMD MI300X", (9, 4), None), ()),
}


@pytest.mark.parametrize("name", GPUS)
def test_auto_is_native_where_it_can_run(name: str) -> None:
    """What cannot is refused with what would work."""
    gpu, native = GPUS[name]
    for scaling in ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"):
        recipe = FP8Recipe(scaling=scaling)  # type: ignore[arg-type]
        assert choose_backend("emulation", recipe, gpu) == "emulation"
        assert choose_backend("auto", recipe, gpu) == (
            "native" if scaling in native else "emulation"
        )
        if scaling in native:
            assert choose_backend("native", recipe, gpu) == "native"
            continue
        with pytest.raises(ConfigError, match=r"backend is 'native': .*emulation") as error:
            choose_backend("native", recipe, gpu)
        for other in native:
            assert f"{other}" in str(error.value).split("Set scaling to")[1]


@pytest.mark.parametrize(
    ("scaling", "gpu", "message"),
    [
        ("current", "none", "no CUDA device; scaling=current would need compute capability 8.9"),
        ("rowwise", "L40", "NVIDIA L40 has compute capability 8.9"),
        ("blockwise", "B200", r"on Hopper \(9.x\) only, and NVIDIA B200 has .* 10.0"),
        ("blockwise", "H100, CUDA 12.6", "needs CUDA 12.9, and torch is built for CUDA 12.6"),
        ("mxfp8", "H100", "scaling=mxfp8 needs Blackwell kernels"),
        ("nvfp4", "B200", "scaling=nvfp4 needs Blackwell kernels, which the native backend does"),
        ("current", "MI300X", "AMD MI300X runs with ROCm"),
    ],
)
def test_refusals_name_what_is_missing(scaling: Any, gpu: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend("native", FP8Recipe(scaling=scaling), GPUS[gpu][0])


def test_every_row_of_a_recipe_counts() -> None:
    recipe = FP8Recipe(scaling="current", modules={"a": {"scaling": "mxfp8"}, "b": "bf16"})
    assert choose_backend("auto", recipe, HOPPER) == "emulation"
    assert choose_backend("auto", replace(recipe, modules={"b": "bf16"}), HOPPER) == "native"
    with pytest.raises(ConfigError, match="scaling=mxfp8 needs Blackwell"):
        choose_backend("native", recipe, HOPPER)
