"""Import of Transformer Engine, with all failures of the import. No torch here."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

from megatron_lightning.errors import ConfigError

TESTED = ((2, 20), (2, 21))
"""First version with checked signatures, and first version beyond."""
INSTALL = 'pip install --no-build-isolation "megatron_lightning[te]"'
_NAMES = (
    "Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "LayerNorm", "RMSNorm",
    "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "autocast", "checkpoint",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "quantized_model_init",
)  # fmt: skip
_NAMES_OF_TENSORS = ("post_all_gather_processing", "quantize_master_weights", "replace_raw_data")


class Library(NamedTuple):
    """The used parts of Transformer Engine."""

    pytorch: Any
    """``transformer_engine.pytorch``: layers, autocast, checkpoint."""
    recipe: Any
    """``transformer_engine.common.recipe``."""
    tensors: Any
    """``transformer_engine.pytorch.tensor.utils``: weights stored as quantized data."""
    version: str


def load(*, has_gpu: bool) -> Library:
    """Return Transformer Engine.

    Args:
        has_gpu: Whether this process has a CUDA device.

    Raises:
        ConfigError: If Transformer Engine cannot be used here. Names the missing part and the
            alternatives.
    """
    if not has_gpu:
        raise ConfigError(
            "backend is 'transformer_engine': Transformer Engine computes on CUDA devices only, "
            "and there is none here. Run on a GPU, or set backend to emulation, which runs on any "
            "device."
        )
    if find_spec("transformer_engine") is None:
        raise _refusal("the package transformer_engine is not installed", f"Install it: {INSTALL}")
    package = _import("transformer_engine")
    version = str(getattr(package, "__version__", "unknown"))
    _check_version(version)
    library = Library(
        _import("transformer_engine.pytorch"),
        _import("transformer_engine.common.recipe"),
        _import("transformer_engine.pytorch.tensor.utils"),
        version,
    )
    missing_names = [name for name in _NAMES if not hasattr(library.pytorch, name)]
    missing_names += [name for name in _NAMES_OF_TENSORS if not hasattr(library.tensors, name)]
    if missing_names:
        raise _refusal(
            f"transformer_engine {version} has no {', '.join(missing_names)}",
            f"Install it again: {INSTALL}",
        )
    return library


def _import(name: str) -> Any:
    """Import a module.

    A package without compiled parts fails in many ways: ImportError without
    transformer_engine_torch, RuntimeError without the core package, OSError or FileNotFoundError
    without a library, AssertionError for packages of different versions.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise _refusal(
            f"transformer_engine is installed, and `import {name}` fails ({cause}), as it does "
            "without its core library, its torch extension transformer_engine_torch, or libraries "
            "of CUDA and cuDNN",
            f"Install all of it: {INSTALL}",
        ) from error


def _check_version(version: str) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    first, end = TESTED
    if match is None or not first <= (int(match[1]), int(match[2])) < end:
        raise _refusal(
            f"transformer_engine {version} is installed, and the signatures of its layers were "
            f"checked for {_dotted(first)} up to, without, {_dotted(end)}",
            f'Install such a version: pip install --no-build-isolation "transformer_engine'
            f'[pytorch]>={_dotted(first)},<{_dotted(end)}"',
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _refusal(reason: str, fix: str) -> ConfigError:
    return ConfigError(
        f"backend is 'transformer_engine': {reason}. {fix}; or set backend to native, which needs "
        "torch only, or to emulation, which runs on any device."
    )
