"""Backends that multiply quantized operands, and their hardware requirements. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from megatron_lightning.config.left_out import LEFT_OUT
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.recipes import FP8Recipe, Scaling

Backend = Literal["auto", "emulation", "native", "transformer_engine"]
Chosen = Literal["emulation", "native"]

NEEDS: Mapping[Scaling, str] = {
    "delayed": "compute capability 8.9 (Ada) or newer",
    "current": "compute capability 8.9 (Ada) or newer",
    "rowwise": "compute capability 9.0 (Hopper) or newer",
    "blockwise": "compute capability 9.0 (Hopper) and CUDA 12.9",
    "mxfp8": "compute capability 10.x (Blackwell)",
    "nvfp4": "compute capability 10.0 (Blackwell) or newer",
}
"""GPU with matrix units for a recipe's operands."""
_LEAST: Mapping[Scaling, tuple[int, int]] = {
    "delayed": (8, 9),
    "current": (8, 9),
    "rowwise": (9, 0),
    "blockwise": (9, 0),
}
"""Least compute capability for torch's GEMMs. Recipes without torch GEMMs are missing."""
_CUDA_OF_BLOCKS = (12, 9)


class Gpu(NamedTuple):
    """Properties of a GPU that decide whether a GEMM can run."""

    name: str
    capability: tuple[int, int]
    cuda: tuple[int, ...] | None
    """CUDA version of the torch build. None: ROCm."""


def choose_backend(backend: str, recipe: FP8Recipe, gpu: Gpu | None) -> Chosen:
    """Return the multiplying backend. ``auto`` is native if all recipes can run natively.

    Transformer Engine does not multiply for our layers, but computes the layers
    (:mod:`megatron_lightning.precision.transformer_engine`).

    Args:
        backend: Name from the user.
        recipe: The recipe, with rows.
        gpu: GPU of this process, or None.

    Raises:
        ConfigError: If the backend cannot run here. Names the missing part and the alternatives.
    """
    if backend == "emulation":
        return "emulation"
    scalings = {recipe.scaling: None}
    scalings |= {row.scaling: None for row in recipe.rows.values() if row is not None}
    # One layer without native kernels is enough: a run has one backend.
    reasons_by_scaling = {scaling: _missing_natively(scaling, gpu) for scaling in scalings}
    reasons = [reason for reason in reasons_by_scaling.values() if reason is not None]
    if backend == "auto":
        return "emulation" if reasons else "native"
    if backend == "native":
        if not reasons:
            return "native"
        raise ConfigError(f"backend is 'native': {'; '.join(reasons)}. {_instead(gpu)}")
    if reason := LEFT_OUT.get(("backend", backend)):
        raise ConfigError(f"backend is {backend!r}. {reason}")
    raise ConfigError(
        f"backend is {backend!r}, which is unknown. Set it to one of "
        f"{', '.join(get_args(Backend))}."
    )


def _missing_natively(scaling: Scaling, gpu: Gpu | None) -> str | None:
    """Return the reason why torch's GEMMs of a recipe cannot run, or None."""
    least = _LEAST.get(scaling)
    if least is None:
        return f"scaling={scaling} needs Blackwell kernels, which the native backend does not call"
    if gpu is None:
        return f"this machine has no CUDA device; scaling={scaling} would need {NEEDS[scaling]}"
    if gpu.cuda is None:
        return f"{gpu.name} runs with ROCm, whose FP8 kernels the native backend does not call"
    return _missing_of(scaling, least, gpu, gpu.cuda)


def _missing_of(
    scaling: Scaling, least: tuple[int, int], gpu: Gpu, cuda: tuple[int, ...]
) -> str | None:
    """Return the part missing on an NVIDIA GPU or in torch."""
    has = f"{gpu.name} has compute capability {'.'.join(map(str, gpu.capability))}"
    if gpu.capability < least:
        return f"scaling={scaling} needs {NEEDS[scaling]}, and {has}"
    if scaling == "blockwise" and gpu.capability[0] != least[0]:
        return f"torch multiplies scaling={scaling} on Hopper (9.x) only, and {has}"
    if scaling == "blockwise" and cuda < _CUDA_OF_BLOCKS:
        version = ".".join(map(str, cuda))
        return f"scaling={scaling} needs CUDA 12.9, and torch is built for CUDA {version}"
    return None


def _instead(gpu: Gpu | None) -> str:
    """Return the working alternatives."""
    native = [scaling for scaling in _LEAST if _missing_natively(scaling, gpu) is None]
    listed = " or ".join(native)
    advice = f"Set scaling to {listed}, which can run natively here. Or set" if native else "Set"
    return (
        f"{advice} backend to emulation, which has the same scales and rounding on any device, or "
        "train in bf16-mixed."
    )
