"""``Trainer(deterministic=True)``: what equal bits need beside torch's own kernels.

Lightning asks torch for deterministic kernels, which also makes the backward of flash attention
deterministic, and sets the workspace of cuBLAS. NCCL and Transformer Engine are asked here, before
either starts.
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
        # Sums inside of switches (NVLS) have no fixed order.
        "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    }
)
"""Variable -> values under which results repeat. The first is set if there is none."""
_KERNELS = ("efficient", "cudnn")
"""Kernels of attention without a deterministic backward."""


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
        if value not in allowed:
            raise ConfigError(
                f"deterministic=True and {name}={value}, with which two runs may differ in their "
                f"bits. Unset {name}, or set one of {', '.join(allowed)}."
            )
    if attention_backend in _KERNELS:
        raise ConfigError(
            f"deterministic=True and attention_backend={attention_backend!r}, whose backward adds "
            'in no fixed order. Set attention_backend to "auto", "flash" or "math".'
        )
    listed = ", ".join(f"{name}={variables[name]}" for name in _ALLOWED)
    rank_zero_info(f"MegatronStrategy: deterministic=True sets {listed}.")


def is_deterministic() -> bool:
    """Return whether torch refuses kernels whose results do not repeat."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()
