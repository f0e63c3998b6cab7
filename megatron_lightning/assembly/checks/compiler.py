"""Check the compiler behind ``torch.compile``, before any process group exists."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch
from torch._dynamo.backends.registry import list_backends

from megatron_lightning import compat
from megatron_lightning.config import CompileOptions
from megatron_lightning.errors import ConfigError


def check_compiler(options: CompileOptions, device: torch.device) -> None:
    """Check the backend, and the tools of inductor for ``device``. Without this
    check, every rank would find missing tools in the first step.

    Raises:
        ConfigError: Names the missing tool.
    """
    backends = list_backends(exclude_tags=())
    if options.backend not in backends:
        raise ConfigError(
            f"backend of compile_options is {options.backend!r}, which torch does not know. Set it "
            f"to one of {', '.join(sorted(backends))}."
        )
    if options.backend != "inductor":
        return
    if device.type == "cpu" and not any(map(shutil.which, compat.cpp_compilers())):
        raise ConfigError(
            'compile="block" writes kernels for the CPU in C++, and there is no compiler here '
            f"(looked for {', '.join(compat.cpp_compilers())}). Install g++ or clang++, set the "
            "environment variable CXX to one, or leave compile out."
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            'compile="block" writes kernels for CUDA in Triton, which is not installed. Install '
            "triton, or leave compile out."
        )
    # Both backends of inductor build a small extension of Python.
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise ConfigError(
            f'compile="block" builds extensions of Python, and {headers} has no Python.h. Install '
            f"the headers of Python {sysconfig.get_python_version()} (python3-dev or "
            "python3-devel), or leave compile out."
        )
