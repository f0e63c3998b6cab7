"""Peak speed of this rank's device, the base of MFU: from the table, or measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision

from megatron_lightning.planning.search.peaks import Kind, peak_flops
from megatron_lightning.strategies.fp8 import quantizing

_SMALLEST, _LARGEST = 512, 8192  # rows of matrices
_LONG_S = 0.01
_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
}


class DevicePeak(NamedTuple):
    """Speed of a device in products of matrices."""

    flops_per_s: float
    source: str
    """Source of the number, for logs."""


def device_peak(device: torch.device, precision: Precision) -> DevicePeak:
    """Return the peak of a device for a precision's number format: from the data sheet, or measured
    for CPUs and for GPUs missing in the table.
    """
    kind = _kind(device, precision)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        listed = peak_flops(name, kind)
        if listed is not None:
            return DevicePeak(listed, f"the {kind} peak of an {name}")
    dtype = torch.float64 if _name(precision).startswith("64") else _DTYPES.get(kind, torch.float32)
    begin = time.perf_counter()
    measured = measured_peak(device, dtype)
    spent = time.perf_counter() - begin
    return DevicePeak(
        measured, f"{str(dtype).removeprefix('torch.')} products measured here for {spent:.2f} s"
    )


@torch.no_grad()
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed of square matrix multiplications of at least 10 ms, in FLOP/s, the best of
    three. Takes about 0.1 s on a CPU.
    """
    size = _SMALLEST
    while True:
        seconds = _seconds_of_matmul(size, device, dtype)
        if seconds >= _LONG_S or size >= _LARGEST:
            return 2.0 * size**3 / seconds
        size *= 2


def _seconds_of_matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers would shift the training's draws. Equal numbers would flatter a GPU's clock.
    a = torch.arange(size * size, device=device).sin().reshape(size, size).to(dtype)
    b, result = a.t().contiguous(), torch.empty_like(a)
    times = []
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        torch.matmul(a, b, out=result)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _name(precision: Precision) -> str:
    return str(getattr(precision, "precision", "32-true"))


def _kind(device: torch.device, precision: Precision) -> Kind:
    """Return the number format of a precision's GEMMs."""
    # Emulated GEMMs are bf16.
    fp8 = quantizing(precision)
    if fp8 is not None and fp8.backend != "emulation":
        return "fp8"
    name = _name(precision)
    if name.startswith("bf16"):
        return "bf16"
    if name.startswith("16"):
        return "fp16"
    rounds = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else "fp32"
