"""Peaks of GPUs by the names that their drivers report, and a peak that is measured."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from megatron_lightning.callbacks.device_peak import device_peak, measured_peak
from megatron_lightning.planning.search.peaks import PEAKS, Kind, peak_flops


@pytest.mark.parametrize(
    ("name", "kind", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "fp8", 4500.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L40S", "bf16", 362.1),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "fp8", 728.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X VF", "fp8", 2614.9),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),  # which has no such units
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),  # a share of the chip
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),  # another chip
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "bf16", None),
    ],
)
def test_the_peak_of_a_name(name: str, kind: Kind, tera: float | None) -> None:
    assert peak_flops(name, kind) == (None if tera is None else pytest.approx(tera * 1e12))


def test_rows_are_dense_and_consistent() -> None:
    """An 8-bit product is twice as fast as a 16-bit one, and tf32 half as fast: a row with the
    numbers of structured sparsity in one column would stand out."""
    for name, row in PEAKS.items():
        assert row.fp32 <= (row.tf32 or row.bf16) <= row.bf16, name
        if row.fp8 is not None:
            assert row.fp8 == pytest.approx(2 * row.bf16, rel=0.02), name
        if row.tf32 is not None:
            assert row.tf32 == pytest.approx(row.bf16 / 2, rel=0.02), name


def test_a_measured_peak_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    peak = device_peak(torch.device("cpu"), Precision())
    assert peak.source.startswith("float32 products measured here")
    assert 1e8 < peak.flops_per_s < 1e15
    assert torch.equal(before, torch.get_rng_state())
    mixed = device_peak(torch.device("cpu"), MixedPrecision("bf16-mixed", "cpu"))
    assert mixed.source.startswith("bfloat16")
    assert measured_peak(torch.device("cpu"), torch.float64) > 1e8


@pytest.mark.parametrize(
    ("precision", "peak"),
    [(Precision(), 66.9), (MixedPrecision("bf16-mixed", "cuda"), 989.4)],
)
def test_a_gpu_is_looked_up(
    precision: Precision, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = device_peak(torch.device("cuda", 0), precision)
    assert found.flops_per_s == pytest.approx(peak * 1e12)
    assert found.source.endswith("peak of an NVIDIA H100 80GB HBM3")
