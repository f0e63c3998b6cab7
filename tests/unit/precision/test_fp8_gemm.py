"""Quantized products: the three of a layer against products of quantized matrices, grouped ones
against a loop over experts, delayed scales, and what a recipe assigns."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.layers.losses.linear_loss import OutputLinear, token_losses
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from megatron_lightning.precision import FP8Recipe, dequantize, quantize
from megatron_lightning.precision.assignment import apply_recipe, remove_recipe
from megatron_lightning.precision.delayed_scaling import advance
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.hadamard import rotate, rotation
from megatron_lightning.precision.recipes import Role
from tests.helpers.layouts import tiny_config
from tests.helpers.quantized import counted_products
from tests.helpers.versions import since
from tests.unit.precision.test_fp8_quantize import RECIPES

# Of gradients, which the recipes of 4 bits otherwise rotate and round at random.
PLAIN = {
    name: replace(recipe, random_hadamard_transform=False, stochastic_rounding=False)
    for name, recipe in RECIPES.items()
    if name != "delayed"
}
COUNTS = [[3, 0, 20, 17], [0, 0, 40, 0], [0, 0, 0, 0]]


def _rounded(x: Tensor, recipe: FP8Recipe, role: Role) -> Tensor:
    """Return the values of the codes, with blocks along the last dim."""
    return dequantize(*quantize(x, recipe, role), recipe, role, size=x.shape[-1])


def _along_rows(x: Tensor, recipe: FP8Recipe, role: Role) -> Tensor:
    """Return the same with blocks along the first dim; square blocks are the same."""
    return _rounded(x.t().contiguous(), recipe, role).t()


def _expected(x: Tensor, w: Tensor, dy: Tensor, recipe: FP8Recipe) -> list[Tensor]:
    """Return the products of quantized matrices in fp64: the straight-through gradients."""
    y = _rounded(x, recipe, "input").double() @ _rounded(w, recipe, "weight").double().t()
    dx = _rounded(dy, recipe, "output_grad").double() @ _along_rows(w, recipe, "weight").double()
    left = _along_rows(dy, recipe, "output_grad").double().t()
    return [y, dx, left @ _along_rows(x, recipe, "input").double()]


def _products(
    x: Tensor, w: Tensor, dy: Tensor, gemm: Gemm, counts: Tensor | None = None
) -> list[Tensor]:
    inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = matmul(*inputs, None, gemm, counts=counts)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def _matrices(tokens: int = 40, size_in: int = 70, size_out: int = 50) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(tokens, size_in),
        torch.randn(size_out, size_in),
        torch.randn(tokens, size_out) * 1e-4,
    ]


@pytest.mark.parametrize("name", PLAIN)
def test_the_three_products_are_those_of_quantized_matrices(name: str) -> None:
    """With ragged blocks in all three dims; the sums differ by the rounding of fp32."""
    x, w, dy = _matrices()
    actual = _products(x, w, dy, EmulatedGemm(PLAIN[name], dtype=torch.float32))
    for own, expected in zip(actual, _expected(x, w, dy, PLAIN[name]), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6 * expected.max())


@pytest.mark.parametrize("name", RECIPES)
def test_products_in_bf16_are_rounded_once(name: str) -> None:
    """Inputs [s, b, n] and a bias, under autocast, whose weight is rounded to bf16 first."""
    x, w, dy = _matrices()
    gemm = EmulatedGemm(replace(RECIPES[name], stochastic_rounding=False))
    exact = EmulatedGemm(replace(RECIPES[name], stochastic_rounding=False), dtype=torch.float32)
    bias = torch.randn(50)
    with torch.autocast("cpu", torch.bfloat16):
        y = matmul(x.view(8, 5, 70), w, bias, gemm)
    rounded = x.bfloat16().float(), w.bfloat16().float()
    expected = _products(*rounded, dy, exact)[0] + bias
    assert y.shape == (8, 5, 50) and y.dtype == torch.bfloat16
    assert torch.equal(y.view(40, 50), expected.bfloat16())


def _layers(kind: str) -> tuple[nn.Module, int]:
    """Return a model and how many of its layers a recipe quantizes."""
    options: dict[str, Any] = {"moe": MoEConfig(num_experts=4)} if kind == "experts" else {}
    config = tiny_config(
        hidden_size=64,
        vocab_size=30,
        max_sequence_length=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **options,
    )
    return GPTModel(config), 8


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_all_three_products_of_every_layer_are_quantized(kind: str) -> None:
    """Per-tensor scales, so that values of an operand are few: at most one for each code (and, of
    experts, for each of 4 scales)."""
    torch.manual_seed(0)
    model, num_layers = _layers(kind)
    assigned = apply_recipe(model, FP8Recipe(scaling="current"))
    assert len(assigned.quantized) == num_layers and not assigned.others
    assert assigned.in_bf16 == ["output_layer"]
    tokens = torch.randint(0, 30, (4, 32))
    with counted_products(num_scales=4 if kind == "experts" else 1) as counts:
        model(tokens, labels=tokens).mean().backward()
    # The router multiplies by autograd's own products.
    assert counts == {"products": 3 * num_layers, "quantized": 3 * num_layers}


def test_a_recipe_leaves_nothing_behind() -> None:
    model, _ = _layers("dense")
    before = {name: type(child) for name, child in model.named_modules()}
    keys = list(model.state_dict())
    apply_recipe(model, FP8Recipe())
    layer = model.get_submodule("decoder.layers.0.mlp.linear_fc1")
    assert type(layer) is AdaptableLinear and isinstance(layer.gemm, EmulatedGemm)
    assert list(model.state_dict()) == keys
    copy = deepcopy(model)
    remove_recipe(model)
    assert {name: type(child) for name, child in model.named_modules()} == before
    assert not any("gemm" in vars(child) for child in model.modules())
    assert type(copy.get_submodule("decoder.layers.0.mlp.linear_fc1")) is AdaptableLinear


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "nvfp4"])
def test_a_recipe_keeps_that_experts_are_multiplied_one_by_one(scaling: Any) -> None:
    """Codes are the same; sums of products have another order."""
    torch.manual_seed(0)
    grouped, _ = _layers("experts")
    assert grouped.config.moe is not None
    moe = replace(grouped.config.moe, grouped_gemm=False)
    single = GPTModel(replace(grouped.config, moe=moe))
    single.load_state_dict(grouped.state_dict())
    tokens = torch.randint(0, 30, (4, 32))
    for model in (grouped, single):
        torch.manual_seed(1)
        apply_recipe(model, FP8Recipe(scaling=scaling), dtype=torch.float32)
        model(tokens, labels=tokens).mean().backward()
    for (name, own), other in zip(single.named_parameters(), grouped.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name
    remove_recipe(single)
    experts = single.get_submodule("decoder.layers.0.mlp.experts.linear_fc1")
    assert type(experts.gemm) is Gemm and experts.gemm.one_by_one


def test_patterns_layers_and_defaults_say_which_layers_are_quantized() -> None:
    model, _ = _layers("dense")
    recipe = FP8Recipe(
        num_layers_at_start_in_bf16=1,
        modules={
            "output_layer": {"scaling": "current"},
            "**.linear_proj": "bf16",
            "decoder.layers.0.mlp.*": {"scaling": "mxfp8"},
        },
    )
    assigned = apply_recipe(model, recipe)
    kinds = {path: gemm.recipe.scaling for path, gemm in assigned.quantized.items()}
    assert kinds == {
        "output_layer": "current",
        "decoder.layers.0.mlp.linear_fc1": "mxfp8",
        "decoder.layers.0.mlp.linear_fc2": "mxfp8",
        "decoder.layers.1.self_attention.linear_qkv": "blockwise",
        "decoder.layers.1.mlp.linear_fc1": "blockwise",
        "decoder.layers.1.mlp.linear_fc2": "blockwise",
    }
    assert "2 by mxfp8, 3 by blockwise, 1 by current" in assigned.describe()
    assert "decoder.layers.0.self_attention.linear_qkv" in assigned.in_bf16


class _Model(nn.Module):
    """Layers with a list of their own, which is longer, and an output layer with any name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(5))})
            for _ in range(3)
        )
        self.to_words = nn.Linear(4, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.to_words


@pytest.mark.parametrize(
    ("first", "last", "quantized"), [(0, 0, "012"), (1, 0, "12"), (1, 1, "1"), (0, 2, "0")]
)
def test_first_and_last_layers_and_output_embeddings_stay_in_bf16(
    first: int, last: int, quantized: str
) -> None:
    recipe = FP8Recipe(num_layers_at_start_in_bf16=first, num_layers_at_end_in_bf16=last)
    found = apply_recipe(_Model(), recipe).quantized
    assert list(found) == [f"layers.{i}.experts.{j}" for i in quantized for j in range(5)]


def test_first_layers_of_two_lists_are_refused() -> None:
    """An encoder and a decoder, or layers of attention beside feed-forward layers."""
    model = nn.ModuleDict({"encoder": _Model(), "decoder": _Model()})
    with pytest.raises(ConfigError, match=r"2 lists of 3 layers: encoder.layers, decoder.layers"):
        apply_recipe(model, FP8Recipe(num_layers_at_start_in_bf16=1))


@pytest.mark.parametrize(("first", "last"), [(3, 0), (2, 2), (0, 5)])
def test_recipes_that_keep_all_layers_in_bf16_are_refused(first: int, last: int) -> None:
    recipe = FP8Recipe(num_layers_at_start_in_bf16=first, num_layers_at_end_in_bf16=last)
    with pytest.raises(ConfigError, match=r"no layer.*num_layers_at_end_in_bf16"):
        apply_recipe(_Model(), recipe)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (FP8Recipe(modules={"**.fc9": "bf16"}), "patterns that match no module"),
        (FP8Recipe(modules={"**": "bf16"}), "quantizes no layer"),
        (FP8Recipe(num_layers_at_end_in_bf16=1), "has no list of layers"),
    ],
)
def test_recipes_that_fit_no_layer_are_refused(recipe: FP8Recipe, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_recipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), recipe)


def test_a_model_of_other_layers_is_refused_with_their_names() -> None:
    model = nn.ModuleDict({"mixer": nn.Conv1d(4, 4, 1), "words": nn.Embedding(4, 4)})
    with pytest.raises(ConfigError, match=r"0 linear layers and others, .* quantized: mixer\."):
        apply_recipe(model, FP8Recipe())


# ------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_experts_are_quantized_one_by_one(name: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    gemm = EmulatedGemm(PLAIN[name], dtype=torch.float32)
    x, dy = torch.randn(sum(counts), 70), torch.randn(sum(counts), 50) * 1e-3
    w = torch.randn(4, 50, 70)
    y, dx, dw = _products(x, w, dy, gemm, torch.tensor(counts))
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        start += count
        if not count:
            assert not dw[expert].any()
            continue
        expected = _products(x[part], w[expert], dy[part], gemm)
        for own, other in zip((y[part], dx[part], dw[expert]), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tokens_of_experts_are_rotated_apart(counts: list[int]) -> None:
    """Weight gradients of rotated operands, each expert padded to 16 tokens, stay close; without
    the padding, tokens of two experts would mix."""
    torch.manual_seed(0)
    recipe = replace(RECIPES["nvfp4"], stochastic_rounding=False)
    x, dy, w = torch.randn(sum(counts), 70), torch.randn(sum(counts), 50), torch.randn(4, 50, 70)
    gemm = EmulatedGemm(recipe, dtype=torch.float32)
    actual = _products(x, w, dy, gemm, torch.tensor(counts))[2]
    exact = _products(x, w, dy, Gemm(), torch.tensor(counts))[2]
    assert (actual - exact).norm() <= 0.25 * exact.norm()


# ---------------------------------------------------------------------------- rotation and rounding


def test_the_rotation_changes_no_product() -> None:
    x, dy = torch.randn(40, 8), torch.randn(40, 6)
    torch.testing.assert_close(rotation(x.device) @ rotation(x.device).t(), torch.eye(16))
    torch.testing.assert_close(rotate(dy).t() @ rotate(x), dy.t() @ x)
    outlier = torch.zeros(16, 1)
    outlier[3] = 4.0
    assert rotate(outlier).abs().unique().tolist() == [1.0]


def test_gradients_of_4_bits_are_right_in_the_mean() -> None:
    """The mean over random bits converges to the product with the unrounded gradient; rounded to
    the nearest, an error stays."""
    x, w, dy = _matrices(16, 16, 16)
    torch.manual_seed(0)
    near, random = (
        EmulatedGemm(replace(PLAIN["nvfp4"], stochastic_rounding=chance), dtype=torch.float32)
        for chance in (False, True)
    )
    exact = dy @ _along_rows(w, PLAIN["nvfp4"], "weight")
    mean = torch.stack([_products(x, w, dy, random)[1] for _ in range(400)]).mean(0)
    biased = (_products(x, w, dy, near)[1] - exact).norm()
    assert (mean - exact).norm() < 0.25 * biased


def test_random_bits_come_from_the_saved_stream() -> None:
    x, w, dy = _matrices()
    streams = RngStreams(3, device=torch.device("cpu"))
    gemm = EmulatedGemm(FP8Recipe(scaling="nvfp4"), streams=streams)
    state, outside = streams.state_dict(), torch.get_rng_state()
    first, second = (_products(x, w, dy, gemm)[1] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), outside)
    streams.load_state_dict(state)
    again = _products(x, w, dy, gemm)[1]
    assert torch.equal(first, again) and not torch.equal(first, second)


# ------------------------------------------------------------------------------------------ delayed


def _delayed(**options: Any) -> EmulatedGemm:
    recipe = FP8Recipe(scaling="delayed", format="hybrid", **options)
    return EmulatedGemm(recipe, dtype=torch.float32)


def _advance(gemm: EmulatedGemm) -> None:
    advance(list(gemm.histories.values()), None)


def test_scales_come_from_earlier_micro_batches() -> None:
    """One entry a micro-batch; within a run all have the scale of the runs before."""
    x, w, dy = _matrices()
    gemm = _delayed(amax_history_len=3, margin=1)
    history = gemm.histories["input"]
    assert gemm.operand(x, "input").scales == 1.0
    history.take_noted()
    for size in (1.0, 4.0):
        _products(x * size, w, dy, gemm)
        assert history.factor == 1.0
    _advance(gemm)
    amax = x.abs().max()
    assert torch.equal(history.entries, torch.stack([amax * 4, amax]))
    assert history.factor == torch.tensor(448.0) / (amax * 4) / 2
    assert gemm.histories["output_grad"].factor == torch.tensor(57344.0) / dy.abs().max() / 2
    for _ in range(3):  # the large one leaves the history
        _products(x, w, dy, gemm)
        _advance(gemm)
    assert torch.equal(history.entries, torch.stack([amax] * 3))


def test_the_latest_micro_batch_may_give_the_scale() -> None:
    x, w, dy = _matrices()
    gemm = _delayed(amax_compute_algo="most_recent")
    for size in (4.0, 1.0):
        _products(x * size, w, dy, gemm)
    _advance(gemm)
    assert gemm.histories["input"].factor == torch.tensor(448.0) / x.abs().max()


def test_values_beyond_the_history_saturate_and_infinities_show() -> None:
    x, w, dy = _matrices()
    gemm = _delayed()
    _products(x, w, dy, gemm)
    _advance(gemm)
    operand = gemm.operand(x * 3, "input")
    assert operand.data.float().abs().max() == 448.0
    x[0, 0] = float("inf")
    assert _products(x, w, dy, gemm)[0].isnan().all()
    factor = gemm.histories["input"].factor.clone()
    _advance(gemm)
    assert gemm.histories["input"].entries.isfinite().all()
    assert gemm.histories["input"].factor < factor  # of the three times larger ones


def test_recomputation_notes_nothing() -> None:
    """Two forwards, one history entry, equal gradients."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    assigned = apply_recipe(nn.ModuleList([layer]), FP8Recipe(scaling="delayed"))
    (gemm,) = assigned.quantized.values()
    results = []
    for recompute in (False, True):
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        results.append(torch.autograd.grad(y.square().sum(), (x, layer.weight)))
        noted = [len(history.take_noted()) for history in gemm.histories.values()]
        assert noted == [1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_history_of_the_same_tensors_gives_the_scales_of_current() -> None:
    """So delayed gradients, too, are straight-through: those of the quantized matrices."""
    x, w, dy = _matrices()
    gemm, current = _delayed(), FP8Recipe(scaling="current", format="hybrid")
    _products(x, w, dy, gemm)
    _advance(gemm)
    for own, expected in zip(_products(x, w, dy, gemm), _expected(x, w, dy, current), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6 * expected.max())


@pytest.mark.slow
def test_a_copy_of_a_layer_has_histories_of_its_own() -> None:
    """Also in compiled graphs, which find a history by its number."""
    layer = nn.ModuleList([nn.Linear(8, 8)])
    (gemm,) = apply_recipe(layer, FP8Recipe(scaling="delayed")).quantized.values()
    copy = deepcopy(layer)
    for module in (layer, copy):
        module[0].compile(backend="aot_eager", fullgraph=True)
        module[0](torch.randn(4, 8))
    for own in (gemm, copy[0].gemm):
        assert [len(own.histories[role].take_noted()) for role in ("input", "weight")] == [1, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_do_not_compile_a_layer_again(compiled: bool) -> None:
    """One graph, however many micro-batches are noted and whatever the scale; a recomputed forward
    notes nothing."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = nn.ModuleList([nn.Linear(8, 8)])
    (gemm,) = apply_recipe(layer, FP8Recipe(scaling="delayed")).quantized.values()
    if compiled:
        layer[0].compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            for _ in range(3):
                x = torch.randn(4, 8, requires_grad=True)
                checkpoint(layer[0], x, use_reentrant=False).sum().backward()
            advance(list(gemm.histories.values()), None)
    assert [len(history.entries) for history in gemm.histories.values()] == [6, 6, 6]


@pytest.mark.parametrize("name", RECIPES)
def test_a_quantized_output_layer_sees_all_tokens_at_once(name: str) -> None:
    """Not chunk by chunk, as losses without logits do."""
    torch.manual_seed(0)
    layer = OutputLinear(64, 40, bias=False)
    recipe = replace(RECIPES[name], stochastic_rounding=False)
    (gemm,) = apply_recipe(nn.ModuleList([layer]), recipe).quantized.values()
    x, targets = torch.randn(9, 30, 64, requires_grad=True), torch.randint(0, 40, (9, 30))
    results = []
    for losses in (
        token_losses(x, targets, layer, CrossEntropy()),
        CrossEntropy()(layer(x), targets),
    ):
        results.append([losses, *torch.autograd.grad(losses.mean(), (x, layer.weight))])
    assert all(torch.equal(own, other) for own, other in zip(*results, strict=True))
    assert all(len(history.take_noted()) == 2 for history in gemm.histories.values())


# ---------------------------------------------------------------------------------------- seams


@pytest.mark.parametrize("name", RECIPES)
def test_weight_gradients_can_be_deferred(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 50, bias=False))
    recipe = replace(RECIPES[name], stochastic_rounding=False)
    apply_recipe(model, recipe, dtype=torch.float32)
    store, x, dy = (
        WeightGradients(),
        torch.randn(4, 10, 70, requires_grad=True),
        torch.randn(4, 10, 50),
    )
    (expected,) = torch.autograd.grad(model(x), model[0].weight, dy)
    assert split_backwards(model, store) == (["0"], [])
    y = model(x)
    with store.collect((0, 0)):
        y.backward(dy)
    assert model[0].weight.grad is None
    store.compute((0, 0))
    assert torch.equal(model[0].weight.grad, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_a_frozen_weight_is_quantized_once(name: str) -> None:
    """Operands are plain tensors: those of a frozen weight can be kept in place of it."""
    x, w, dy = _matrices()
    gemm = EmulatedGemm(replace(RECIPES[name], stochastic_rounding=False), dtype=torch.float32)
    kept = gemm.operand(w, "weight"), gemm.operand(w, "weight", transposed=True)
    assert all(operand.data.dtype.itemsize == 1 for operand in kept)
    inputs = x.clone().requires_grad_()
    y = matmul(inputs, w, None, gemm)
    (dx,) = torch.autograd.grad(y, inputs, dy)
    assert torch.equal(gemm.forward(gemm.operand(x, "input"), kept[0]), y)
    assert torch.equal(gemm.input_grad(gemm.operand(dy, "output_grad"), kept[1]), dx)


@pytest.mark.slow
@since("torch", "2.12", "torch 2.11 makes no graph of emulated layers (docs/fp8.md)")
@pytest.mark.parametrize(
    "scaling",
    ["current", *(pytest.param(n, marks=pytest.mark.slow) for n in ("blockwise", "mxfp8"))],
)
def test_quantized_layers_are_compiled(scaling: Any) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleList([nn.Linear(64, 48)])
    apply_recipe(layer, FP8Recipe(scaling=scaling), dtype=torch.float32)
    x = torch.randn(4, 64, requires_grad=True)
    expected = torch.autograd.grad(layer[0](x).square().sum(), (x, layer[0].weight))
    layer[0].compile(backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(layer[0](x).square().sum(), (x, layer[0].weight))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not torch.equal(F.linear(x, layer[0].weight, layer[0].bias), layer[0](x))
