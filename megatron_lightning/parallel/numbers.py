"""Numbers as tensors on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def number_on(device: torch.device, value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a number, or a tensor of a single number, as a tensor [] on ``device``.

    A Python number is filled in on the device: a copy from the host would make the host wait for
    the device.
    """
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
