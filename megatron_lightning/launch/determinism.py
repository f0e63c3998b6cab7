"""``Trainer(deterministic=True)``: what equal bits need beside torch's own kernels.

Lightning asks torch for deterministic kernels, which also makes the backward of torch's own flash
and of efficient attention deterministic, and sets the workspace of cuBLAS. NCCL, Transformer Engine
and the package flash-attn of Hugging Face models are asked here, before any starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.errors import ConfigError

_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
        "FLASH_ATTENTION_DETERMINISTIC": ("1",),
    }
)
"""Variable -> values under which results repeat. The first is set if there is none."""


def set_determinism(
    device_type: str,
    attention_backend: str | None,
    environment: MutableMapping[str, str] | None = None,
) -> None:
    """Set and check what a deterministic run needs on this device. No-op unless torch has been
    asked for deterministic kernels, without warnings only.

    Args:
        device_type: Type of the rank's device.
        attention_backend: The model's, if the model chooses one.
        environment: None: the process's.

    Raises:
        ConfigError: If a variable or the attention excludes equal bits.
    """
    if not is_deterministic() or device_type != "cuda":
        return
    variables = os.environ if environment is None else environment
    for name, allowed in _ALLOWED.items():
        value = variables.setdefault(name, allowed[0])
        if not _is_allowed(name, value):
            raise ConfigError(
                f"deterministic=True and {name}={value}, with which two runs may differ in their "
                f"bits. Unset {name}, or set one of {', '.join(allowed)}"
                f"{', or a list of them such as Ring,Tree' if name == 'NCCL_ALGO' else ''}."
            )
    if attention_backend == "cudnn":
        raise ConfigError(
            'deterministic=True and attention_backend="cudnn", whose backward adds in no fixed '
            'order. Set attention_backend to "auto", "flash", "efficient" or "math".'
        )
    listed = ", ".join(f"{name}={variables[name]}" for name in _ALLOWED)
    rank_zero_info(f"MegatronStrategy: deterministic=True sets {listed}.")


def _is_allowed(name: str, value: str) -> bool:
    """Return whether results repeat under a variable. NCCL reads lists, in upper and lower case."""
    if name != "NCCL_ALGO":
        return value in _ALLOWED[name]
    names = value.lower().removeprefix("^").split(",")
    if value.startswith("^"):  # sums inside of switches (NVLS) have no fixed order
        return "nvls" in names
    return set(names) <= {one.lower() for one in _ALLOWED[name]}


def is_deterministic() -> bool:
    """Return whether torch refuses kernels whose results do not repeat."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()
