"""Versions, devices and backends of this process."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.transformer_engine.library import load

_PACKAGES = (
    "megatron_lightning", "torch", "lightning", "jsonargparse", "numpy", "safetensors",
    "transformers", "triton", "flash-attn", "transformer_engine",
)  # fmt: skip
_GIB = 2**30


def installed() -> dict[str, str | None]:
    """Return the versions of the packages. None: not installed."""
    packages: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return packages


def system() -> dict[str, str | None]:
    """Return driver and system in the words of torch's bug reports."""
    facts = {
        "system": platform.platform(),
        "CUDA of torch": torch.version.cuda or torch.version.hip,
    }
    if torch.cuda.is_available():
        tools: Any = collect_env
        facts["driver"] = tools.get_nvidia_driver_version(tools.run)
        cudnn: Any = torch.backends.cudnn
        facts["cuDNN"] = str(cudnn.version())
    return facts


def devices() -> list[str]:
    """Return a line for each GPU, or a line for the CPU."""
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            f"cuda:{index} {gpu.name}, {gpu.total_memory / _GIB:.0f} GiB, compute capability "
            f"{gpu.major}.{gpu.minor}"
            for index, gpu in enumerate(gpus)
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [f"cpu, {cores} cores, {memory:.0f} GiB, {torch.get_num_threads()} threads of torch"]


def backends() -> dict[str, str]:
    """Return the backend -> version of the backend, or the reason for the backend's absence."""
    states = {"gloo": "available" if dist.is_gloo_available() else "missing in this torch"}
    if not dist.is_nccl_available():
        states["NCCL"] = "missing in this torch"
    elif not torch.cuda.is_available():
        states["NCCL"] = "no CUDA device"
    else:
        states["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        library = load(has_gpu=torch.cuda.is_available())
        states["Transformer Engine"] = f"{library.version} loads"
    except ConfigError as error:
        states["Transformer Engine"] = f"does not load: {_reason(str(error))}"
    return states


def _reason(text: str) -> str:
    """Return the reason in a refusal, without the option and the alternatives."""
    return text.partition(": ")[2].partition(". ")[0] or text
