"""Casts to 8 and 4 bits against formats written from their definitions, and against ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lightning.precision.formats import (
    FORMAT_MAX,
    cast,
    pack_e2m1,
    power_of_two_below,
    rounded,
    to_e8m0,
    unpack_e2m1,
)
from tests.helpers.number_formats import E2M1, E4M3, E5M2, NumberFormat, e8m0_up

FORMATS: dict[str, tuple[NumberFormat, Any]] = {
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
}


def _codes(x: Tensor, name: str) -> np.ndarray[Any, Any]:
    """Cast, and return the codes as the format counts them."""
    done = cast(x, name)
    if name == "e2m1":
        return unpack_codes(pack_e2m1(done), len(x))
    return done.view(torch.uint8).numpy()


def unpack_codes(packed: Tensor, size: int) -> np.ndarray[Any, Any]:
    low, high = packed.numpy() & 15, packed.numpy() >> 4
    return np.stack((low, high), -1).reshape(*packed.shape[:-1], -1)[..., :size]


def _around(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values, the middles between them, and the fp32 neighbors of both."""
    points = np.concatenate((values, (values[1:] + values[:-1]) / 2)).astype(np.float32)
    inf = np.float32(np.inf)
    near = np.concatenate((points, np.nextafter(points, inf), np.nextafter(points, -inf)))
    return np.concatenate((near, -near))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_a_fixed_point(name: str) -> None:
    """Subnormals and both zeros included."""
    reference, other = FORMATS[name]
    values = np.array([reference.value(code) for code in range(2 * reference.sign)])
    finite = np.isfinite(values)
    codes = np.arange(2 * reference.sign, dtype=np.uint8)
    assert np.array_equal(_codes(torch.tensor(values[finite]).float(), name), codes[finite])
    theirs = codes.view(other).astype(np.float64)
    assert np.array_equal(theirs[finite], values[finite])
    assert finite.sum() == {"e4m3": 254, "e5m2": 248, "e2m1": 16}[name]
    assert values[finite].max() == FORMAT_MAX[name]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_rounded_to_the_nearest_code_and_ties_to_the_even_one(name: str) -> None:
    reference, other = FORMATS[name]
    x = _around(reference.values)
    assert np.array_equal(_codes(torch.tensor(x), name), reference.encode(x))
    inside = x[np.abs(x) <= FORMAT_MAX[name]]
    theirs = inside.astype(other).view(np.uint8)
    assert np.array_equal(_codes(torch.tensor(inside), name), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_random_values_are_rounded_as_the_definition_says(name: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20_000) * np.exp2(rng.uniform(-20, 17, 20_000))).astype(np.float32)
    assert np.array_equal(_codes(torch.tensor(x), name), FORMATS[name][0].encode(x))


@pytest.mark.parametrize("name", FORMATS)
def test_values_beyond_the_largest_saturate(name: str) -> None:
    """In memory of any layout: torch takes other paths for short and for strided tensors."""
    largest = FORMAT_MAX[name]
    beyond = [largest * 1.001, largest * 1.07, largest * 2, 1e30, float("inf")]
    for x in (torch.tensor(beyond), torch.tensor(beyond).repeat(64), torch.ones(9, 5)):
        x = torch.tensor(beyond).expand(9, 5).t() if x.ndim == 2 else x
        assert (cast(x, name).float() == largest).all()
        assert (cast(-x, name).float() == -largest).all()


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_values_stay_in_fp32(name: str) -> None:
    """Of every magnitude, with ties, signs of zero and NaN."""
    bits = torch.arange(-(1 << 31), 1 << 31, (1 << 12) + 1).to(torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.arange(-4096, 4097) * 2.0**-11))
    x = torch.cat((x, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])))
    expected, found = cast(x, name).float(), rounded(x, name)
    known = ~x.isnan()
    assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))
    if name == "e4m3":
        assert bool(found[~known].isnan().all())


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays(name: str) -> None:
    assert cast(torch.tensor([float("nan"), 1.0]), name).float().isnan().tolist() == [True, False]


def test_e8m0_is_rounded_up() -> None:
    """Every power of two, its neighbors, subnormals, zero, the largest, infinity and NaN."""
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32)
    with np.errstate(over="ignore"):
        x = np.concatenate((powers, np.nextafter(powers, np.float32(np.inf)), powers * 1.5))
    special = [0.0, np.finfo(np.float32).max, np.inf, np.nan, 3.0, 0.75]
    x = np.concatenate((x, np.array(special, np.float32)))
    made = to_e8m0(torch.tensor(x))
    assert np.array_equal(made.view(torch.uint8).numpy(), e8m0_up(x))
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ours = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert made[-2:].float().tolist() == [4.0, 1.0]


def test_powers_of_two_below() -> None:
    x = torch.tensor([1.0, 1.99, 2.0, 3.4e38, 1.2e-38, 448.0, -5.0])
    assert power_of_two_below(x).tolist() == [1, 1, 2, 2.0**127, 2.0**-126, 256, 4]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_codes_of_4_bits_are_packed(size: int) -> None:
    x = torch.tensor([-6.0, 0.5, -0.0, 4.0, 1.5, -3.0, 0.0]).repeat(7)[: 3 * size].view(3, size)
    packed = pack_e2m1(x)
    assert packed.shape == (3, (size + 1) // 2) and packed.dtype == torch.uint8
    assert torch.equal(unpack_e2m1(packed, size), x)
    assert packed.view(torch.float4_e2m1fn_x2).dtype == torch.float4_e2m1fn_x2
    assert torch.equal(pack_e2m1(torch.tensor([0.5, -6.0])), torch.tensor([0xF1]).to(torch.uint8))


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """Between codes, at the ends of each spacing, and never beyond the largest."""
    torch.manual_seed(0)
    for value in (0.1, 0.3, 0.5, 1.2, 1.9, 2.25, 3.9, 4.5, 5.9, -0.1, -2.75, 6.0):
        x = torch.full((40_000,), value)
        rounded = cast(x, "e2m1", torch.rand(x.shape)).float()
        below = E2M1.values[E2M1.values <= abs(value)].max()
        assert set(rounded.abs().unique().tolist()) <= {below, *_next(below)}
        # Five standard errors of the mean of at most 2 x Bernoulli.
        assert abs(rounded.mean().item() - value) < 5 * 1.0 / 200
    highest = torch.full((8,), 1.0 - 2.0**-24)
    assert cast(torch.full((8,), 6.0), "e2m1", highest).float().tolist() == [6.0] * 8


def _next(value: float) -> list[float]:
    return [v for v in E2M1.values.tolist() if v > value][:1]
