"""Peak speeds of GPUs in products of matrices, from their makers' data sheets. No torch here.

Speeds are dense, without structured sparsity. Data sheets often print the twice as high sparse
numbers. Sums are in fp32 if a data sheet distinguishes, as for GeForce cards. Sources:

Sources:
    A100, A800   NVIDIA A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)
    A10, A10G, A30, A40, RTX A6000    their NVIDIA datasheets; GA102 whitepaper v2
    L4, L40, L40S, RTX 6000 Ada, RTX 4090    their NVIDIA datasheets; Ada whitepaper v2.1
    H100, H800, H200, GH200, H20    nvidia.com/en-us/data-center/{h100,h200,grace-hopper-superchip},
        halved; Hopper whitepaper v1.04
    B100, B200, GB200, GB300    NVIDIA Blackwell datasheet 3384703 and architecture brief, halved
    RTX 5090     NVIDIA RTX Blackwell whitepaper
    MI210 to MI355X    amd.com/en/products/accelerators/instinct; MI250X is one of its two dies,
        which is a device of its own for torch
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["fp8", "bf16", "fp16", "tf32", "fp32"]
"""Number format of the operands. tf32: fp32 rounded by the matrix units."""


class Peak(NamedTuple):
    """TFLOP/s of a device. None: the matrix units do not take the format."""

    bf16: float
    """Of fp16 as well."""
    fp8: float | None
    tf32: float | None
    fp32: float


_HOPPER_SXM = Peak(989.4, 1978.9, 494.7, 66.9)
_HOPPER_NVL = Peak(835.5, 1670.5, 417.5, 60.0)
_AMPERE = Peak(312.0, None, 156.0, 19.5)
_GRACE_BLACKWELL = Peak(2500.0, 5000.0, 1250.0, 80.0)
_MI300X = Peak(1307.4, 2614.9, 653.7, 163.4)

PEAKS: Mapping[str, Peak] = {
    "a100": _AMPERE,
    "a800": _AMPERE,
    "a10": Peak(125.0, None, 62.5, 31.2),
    "a10g": Peak(70.0, None, 35.0, 35.0),
    "a30": Peak(165.0, None, 82.0, 10.3),
    "a40": Peak(149.7, None, 74.8, 37.4),
    "rtx a6000": Peak(154.8, None, 77.4, 38.7),
    "rtx 3090": Peak(71.0, None, 35.6, 35.6),
    "l4": Peak(121.0, 242.5, 60.0, 30.3),
    "l40": Peak(181.0, 362.0, 90.5, 90.5),
    "l40s": Peak(362.1, 733.0, 183.0, 91.6),
    "rtx 6000 ada": Peak(364.2, 728.5, 182.1, 91.1),
    "rtx 4090": Peak(165.2, 330.3, 82.6, 82.6),
    "rtx 5090": Peak(209.5, 419.0, 104.8, 104.8),
    "h100": _HOPPER_SXM,
    "h100 pcie": Peak(756.0, 1513.0, 378.0, 51.2),
    "h100 nvl": _HOPPER_NVL,
    "h800": _HOPPER_SXM,
    "h20": Peak(148.0, 296.0, 74.0, 44.0),
    "h200": _HOPPER_SXM,
    "h200 nvl": _HOPPER_NVL,
    "gh200": _HOPPER_SXM,
    "b100": Peak(1750.0, 3500.0, 875.0, 60.0),
    "b200": Peak(2250.0, 4500.0, 1125.0, 75.0),
    "gb200": _GRACE_BLACKWELL,
    "gb300": _GRACE_BLACKWELL,
    "mi210": Peak(181.0, None, None, 45.3),
    "mi250x": Peak(191.5, None, None, 47.9),
    "mi300x": _MI300X,
    "mi325x": _MI300X,
    "mi350x": Peak(2306.9, 4613.7, None, 144.2),
    "mi355x": Peak(2516.6, 5033.2, None, 157.3),
}
"""Keyed by the words that distinguish the device in the driver's name."""

_PARTS_AND_VARIANTS = frozenset({"mig", "grid", "laptop", "mobile", "d"})
"""Words in names of devices with a share of a chip, or a smaller chip."""


def peak_flops(device_name: str, kind: Kind) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, or None if the table lacks the GPU.

    Args:
        device_name: The driver's name: "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB".
        kind: Number format of the operands.
    """
    words = frozenset(re.findall(r"[a-z0-9]+", device_name.lower()))
    rows = [name for name in PEAKS if words.issuperset(name.split())]
    if not rows or words & _PARTS_AND_VARIANTS:
        return None
    row = PEAKS[max(rows, key=lambda name: len(name.split()))]
    tera: float | None = row.bf16 if kind == "fp16" else getattr(row, kind)
    return None if tera is None else tera * 1e12
