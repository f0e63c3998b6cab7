"""Backends: who multiplies quantized operands, and what each needs. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.recipes import Scaling

Backend = Literal["auto", "emulation", "native", "transformer_engine"]

NEEDS: Mapping[Scaling, str] = {
    "delayed": "compute capability 8.9 (Ada) or newer",
    "current": "compute capability 8.9 (Ada) or newer",
    "rowwise": "compute capability 9.0 (Hopper) or newer",
    "blockwise": "compute capability 9.0 (Hopper) or newer and CUDA 12.9",
    "mxfp8": "compute capability 10.x (Blackwell)",
    "nvfp4": "compute capability 10.0 (Blackwell) or newer",
}
"""GPU whose matrix units take a recipe's operands."""
_MISSING: Mapping[str, str] = {
    "native": "products by torch's scaled kernels are not part of this version",
    "transformer_engine": "layers of Transformer Engine are not part of this version",
}


def choose_backend(backend: str, scaling: Scaling, *, has_cuda: bool) -> Literal["emulation"]:
    """Return the backend that multiplies.

    Raises:
        ConfigError: If it cannot run here: by name, with what is missing.
    """
    if backend in ("auto", "emulation"):
        return "emulation"
    if backend == "kitchen":
        missing = "Kitchen is not public, and not part of this package"
    elif backend in _MISSING:
        here = "" if has_cuda else ", and this machine has no CUDA device"
        missing = f"{_MISSING[backend]}{here}; scaling={scaling} would need {NEEDS[scaling]}"
    else:
        missing = f"it is unknown; the backends are {', '.join(get_args(Backend))}"
    raise ConfigError(
        f"backend is {backend!r}: {missing}. Set it to emulation, which has the same scales and "
        "rounding on any device, or train in bf16-mixed."
    )
