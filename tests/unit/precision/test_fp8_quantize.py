"""``quantize`` bit-equal to an independent reference, for every recipe, role and shape; and recipes
that cannot be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision import FP8Recipe, dequantize, quantize
from megatron_lightning.precision.backends import choose_backend
from megatron_lightning.precision.quantization import TwoLevelScales
from megatron_lightning.precision.recipes import BLOCK_SIZES, Role
from megatron_lightning.strategies import MegatronFP8Precision
from tests.helpers.number_formats import E2M1, E4M3, E5M2, quantize_matrix
from tests.unit.precision.test_fp8_formats import unpack_codes

RECIPES: dict[str, FP8Recipe] = {
    "delayed": FP8Recipe(scaling="delayed", format="hybrid"),
    "current": FP8Recipe(scaling="current"),
    "current-hybrid": FP8Recipe(scaling="current", format="hybrid", power_of_two_scales=True),
    "rowwise": FP8Recipe(scaling="rowwise"),
    "blockwise": FP8Recipe(scaling="blockwise"),
    "blockwise-fp32": FP8Recipe(scaling="blockwise", power_of_two_scales=False),
    "mxfp8": FP8Recipe(scaling="mxfp8"),
    "nvfp4": FP8Recipe(scaling="nvfp4"),
    "nvfp4-1d": FP8Recipe(scaling="nvfp4", weight_2d_scaling=False),
}
ROLES: tuple[Role, ...] = ("input", "weight", "output_grad")
SHAPES = [(40, 256), (3, 5, 33), (7, 129), (1, 1), (200, 130)]


def _block(recipe: FP8Recipe, role: Role, shape: tuple[int, int]) -> tuple[int, int]:
    """Return what shares a scale, written out from the table of the recipes."""
    if recipe.scaling in ("delayed", "current"):
        return shape
    if recipe.scaling == "rowwise":
        return 1, shape[1]
    size = BLOCK_SIZES[recipe.scaling]
    square = recipe.scaling == "blockwise" or (recipe.scaling, recipe.weight_2d_scaling) == (
        "nvfp4",
        True,
    )
    return (size, size) if square and role == "weight" else (1, size)


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values over many binary places, with blocks of zeros."""
    torch.manual_seed(len(shape) * shape[-1])
    x = torch.randn(shape) * torch.exp2(torch.randint(-8, 9, shape).float())
    x[..., : shape[-1] // 3] *= 1e-3
    if shape[0] > 2:
        x[1] = 0.0
    return x.to(dtype)


@pytest.mark.spread(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_codes_and_scales_are_those_of_the_definition(
    name: str, role: Role, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    recipe, x = RECIPES[name], _values(shape, dtype)
    if role == "weight":
        x = x.flatten(0, -2)
    matrix = x.float().reshape(-1, x.shape[-1]).numpy()
    data, scales = quantize(x, recipe, role)
    is_e5m2 = recipe.format == "hybrid" and role == "output_grad"
    data_format = E2M1 if recipe.scaling == "nvfp4" else E5M2 if is_e5m2 else E4M3
    block = _block(recipe, role, matrix.shape)  # type: ignore[arg-type]
    codes, expected, tensor_scale = quantize_matrix(
        matrix, recipe.scaling, data_format, block, recipe.rounds_scales
    )
    if isinstance(scales, TwoLevelScales):
        assert data.shape == (*x.shape[:-1], (x.shape[-1] + 1) // 2)
        assert scales.tensor.item() == tensor_scale
        flat = unpack_codes(data.reshape(-1, data.shape[-1]), x.shape[-1])
        own = scales.blocks.view(torch.uint8).numpy()
    else:
        assert data.shape == x.shape and data.dtype.itemsize == 1
        assert (data.dtype == torch.float8_e5m2) == is_e5m2
        flat = data.view(torch.uint8).numpy().reshape(matrix.shape)
        own = (scales.view(torch.uint8) if recipe.scaling == "mxfp8" else scales).numpy()
    assert np.array_equal(own.reshape(expected.shape), expected)
    assert np.array_equal(flat, codes)
    _check_shape(own.shape, recipe, role, x, block)


def _check_shape(
    own: tuple[int, ...], recipe: FP8Recipe, role: Role, x: Tensor, block: tuple[int, int]
) -> None:
    if recipe.is_per_tensor:
        assert own == ()
    elif role == "weight":
        assert own == (-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
    else:
        assert own == (*x.shape[:-1], -(-x.shape[-1] // block[1]))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_values_come_back_within_half_a_step(name: str, role: Role) -> None:
    """Of codes with 3, 2 and 1 bits: 2^-4, 2^-3 and 2^-2 relative, or half the smallest code."""
    recipe = RECIPES[name]
    x = torch.randn(40, 200) if role == "weight" else torch.randn(4, 10, 200)
    y = dequantize(*quantize(x, recipe, role), recipe, role)
    step = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 2**-2}[recipe.data_format(role)]
    smallest = {"e4m3": 2**-10, "e5m2": 2**-17, "e2m1": 0.25}[recipe.data_format(role)]
    # Scales rounded up to powers of two leave up to one binary place unused, e4m3 ones 2^-4.
    largest = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[recipe.data_format(role)]
    limit = torch.maximum(x.abs() * step, x.abs().max() / largest * smallest * 2.2)
    assert ((y - x).abs() <= limit).all()
    odd = x[..., :33].contiguous()
    assert dequantize(*quantize(odd, recipe, role), recipe, role, size=33).shape == odd.shape


def test_a_margin_leaves_binary_places_free() -> None:
    recipe = replace(RECIPES["delayed"], margin=2)
    x = torch.randn(8, 16)
    assert torch.equal(quantize(x, recipe)[1], quantize(x, RECIPES["delayed"])[1] * 4)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", RECIPES)
def test_an_overflow_shows(name: str, wrong: float) -> None:
    """What shares a scale with an infinity or NaN is not finite any more, or is zero beside an
    infinity (mxfp8); the rest of the tensor is as it was."""
    x = torch.randn(4, 256)
    x[2, 5] = wrong
    recipe = RECIPES[name]
    y = dequantize(*quantize(x, recipe), recipe)
    assert not y[2, 5].isfinite()
    if recipe.scaling in ("rowwise", "blockwise", "mxfp8"):
        assert torch.equal(y[[0, 1, 3]], dequantize(*quantize(x[[0, 1, 3]], recipe), recipe))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e30, 3e38])
def test_scales_of_tiny_and_huge_values(name: str, size: float) -> None:
    recipe = RECIPES[name]
    x = torch.tensor([[1.0, -0.5, 0.25, 0.0] * 8]) * size
    y = dequantize(*quantize(x, recipe), recipe)
    assert y.isfinite().all()
    if size > 1e-36:
        torch.testing.assert_close(y / size, x / size, rtol=0.13, atol=0.0)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_experts_are_quantized_one_by_one(name: str) -> None:
    """Of one size they would share a scale by chance; with delayed scaling they do."""
    recipe, x = (
        RECIPES[name],
        torch.randn(3, 40, 33) * torch.tensor([1.0, 30.0, 0.1])[:, None, None],
    )
    values = dequantize(*quantize(x, recipe, "weight"), recipe, "weight", size=33)
    if name == "delayed":
        assert torch.equal(values, dequantize(*quantize(x, recipe), recipe))
        return
    alone = [dequantize(*quantize(w, recipe, "weight"), recipe, "weight", size=33) for w in x]
    assert torch.equal(values, torch.stack(alone))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_empty_tensors_have_empty_codes(name: str, role: Role) -> None:
    recipe = RECIPES[name]
    for shape in ((0,), (0, 8), (8, 0), (2, 0, 5), (2, 5, 0)):
        data, scales = quantize(torch.zeros(shape), recipe, role)
        assert dequantize(data, scales, recipe, role, size=shape[-1]).shape == shape


def test_an_unknown_role_is_refused_and_codes_have_no_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    data, scales = quantize(x, RECIPES["rowwise"])
    assert isinstance(scales, Tensor) and not data.requires_grad and not scales.requires_grad
    role: Any = "activation"
    with pytest.raises(ConfigError, match=r"role is 'activation'.*input, weight, output_grad"):
        quantize(x, RECIPES["rowwise"], role)


# ------------------------------------------------------------------------------------------ recipes

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown scaling": ({"scaling": "tiles"}, "scaling is 'tiles', which is unknown"),
    "kitchen": ({"scaling": "kitchen"}, "Kitchen.* is not public"),
    "tensorwise": ({"scaling": "tensorwise"}, "Set it to current"),
    "e5m2": ({"format": "e5m2"}, "Set it to hybrid"),
    "hybrid blocks": ({"format": "hybrid", "scaling": "mxfp8"}, "format is hybrid .*mxfp8"),
    "margin": ({"margin": 1}, "margin is 1 with scaling=blockwise, which has no history"),
    "history": ({"scaling": "nvfp4", "amax_history_len": 2}, "amax_history_len is 2"),
    "history of none": ({"scaling": "delayed", "amax_history_len": 0}, "positive integer"),
    "algorithm": ({"scaling": "delayed", "amax_compute_algo": "mean"}, "max, most_recent"),
    "bf16 layers": (
        {"scaling": "delayed", "num_layers_at_end_in_bf16": 2},
        "2 layers .* scaling=delayed.* Set scaling to current",
    ),
    "negative": ({"num_layers_at_start_in_bf16": -1}, "is -1; it must be an integer of 0 or more"),
    "mxfp8 scales": ({"scaling": "mxfp8", "power_of_two_scales": False}, "whose format says True"),
    "nvfp4 scales": ({"scaling": "nvfp4", "power_of_two_scales": True}, "whose format says False"),
    "parameters": ({"fp8_param": True}, "fp8_param is True and fp8_param_gather is False.*Set"),
    **{
        f"gathers {scaling}": (
            {"scaling": scaling, "fp8_param_gather": True},
            f"fp8_param_gather is True and scaling is {scaling}: .*{why}.*blockwise or current",
        )
        for scaling, why in {"rowwise": "2 bytes", "mxfp8": "2 bytes", "nvfp4": "4 bits"}.items()
    },
    "gathers a row": (
        {"fp8_param_gather": True, "modules": {"a": {"scaling": "mxfp8"}}},
        r"modules\['a'\] is mxfp8",
    ),
    "gathers by a row": (
        {"modules": {"a": {"fp8_param_gather": True}}},
        r"modules\['a'\] sets fp8_param_gather.* outer recipe",
    ),
    "row": ({"modules": {"a.*": "fp16"}}, r"modules\['a.\*'\] is 'fp16'"),
    "field of a row": ({"modules": {"a": {"scalin": "x"}}}, r"modules\['a'\] sets scalin, which"),
    "layers of a row": (
        {"modules": {"a": {"num_layers_at_start_in_bf16": 1}}},
        r"modules\['a'\] keeps first or last layers in bf16",
    ),
    "no patterns": ({"modules": ["a"]}, r"modules is \['a'\]; it must map patterns"),
    "list": ({"scaling": ["current"]}, r"scaling is \['current'\], which is unknown"),
    "word": ({"scaling": "nvfp4", "stochastic_rounding": "no"}, "'no'; it must be true or false"),
    "scales": ({"power_of_two_scales": "yes"}, "is 'yes'; it must be true, false or null"),
    "rows of blocks": ({"weight_2d_scaling": False}, "False with scaling=blockwise.*128 x 128"),
    "nested rows": ({"modules": {"a": {"modules": {"b": "bf16"}}}}, "has patterns of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_recipe_cannot_be_is_refused_by_name(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        FP8Recipe(**options)


@pytest.mark.parametrize("backend", ["native", "kitchen", "cublas"])
def test_backends_that_cannot_run_are_refused_by_name(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend is '{backend}'[:,.] .*emulation"):
        choose_backend(backend, FP8Recipe(scaling="mxfp8"), None)
    assert choose_backend("auto", FP8Recipe(scaling="nvfp4"), None) == "emulation"


def test_rows_of_yaml_are_recipes() -> None:
    recipe = FP8Recipe(modules={"a": {"scaling": "mxfp8"}, "b": "bf16", "c": FP8Recipe()})
    assert recipe.rows == {"a": FP8Recipe(scaling="mxfp8"), "b": None, "c": FP8Recipe()}
    assert not recipe.has_history
    assert replace(recipe, modules={"a": {"scaling": "delayed"}}).has_history
    assert len({recipe, replace(recipe), FP8Recipe()}) == 2


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.int64), torch.tensor(1.0)])
def test_only_floating_tensors_are_quantized(x: Tensor) -> None:
    with pytest.raises(ConfigError, match="must be a floating tensor"):
        quantize(x, FP8Recipe())


@pytest.mark.parametrize("recipe", ["mxfp8", {"scaling": "mxfp8"}])
def test_only_recipes_are_recipes(recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"recipe is .*FP8Recipe"):
        quantize(torch.ones(3), recipe)
    with pytest.raises(ConfigError, match=r"recipe is .*FP8Recipe"):
        MegatronFP8Precision(recipe=recipe)


def test_a_recipe_needs_no_torch() -> None:
    code = "import sys; from megatron_lightning.precision import FP8Recipe; FP8Recipe(); "
    code += "raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
