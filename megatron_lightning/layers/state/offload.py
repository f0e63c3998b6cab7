"""Offload tensors saved for backward to host memory.

Copies run on a separate stream, between the device and pinned memory, and overlap with the
computation. A tensor is copied to the host when saved, and back when backward unpacks the tensor.
Parameters and small tensors stay on the device. On the CPU all tensors stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _OnHost:
    """A saved tensor in pinned memory."""

    values: Tensor
    device: torch.device
    stream: torch.cuda.Stream

    def fetch(self) -> Tensor:
        """Return the tensor on the original device, ready for the current stream."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            tensor = self.values.to(self.device, non_blocking=True)
        current.wait_stream(self.stream)
        tensor.record_stream(current)
        return tensor


def offloaded(forward: Callable[..., Any], /, *args: Any, min_bytes: int, **kwargs: Any) -> Any:
    """Run ``forward``, a method of a module or a wrapper around a method.

    Saved tensors of at least ``min_bytes`` go to the host.
    """
    device = next(
        (value.device for value in args if isinstance(value, Tensor)), torch.device("cpu")
    )
    if device.type != "cuda" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Parameters live on the device anyway.
    stays = {parameter.untyped_storage().data_ptr() for parameter in _parameters(forward)}
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        if (
            tensor.device != device
            or tensor.nbytes < min_bytes
            or tensor.untyped_storage().data_ptr() in stays
        ):
            return tensor
        values = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            values.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # keeps the memory until the copy is done
        return _OnHost(values, device, stream)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.fetch() if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def _parameters(forward: Any) -> list[nn.Parameter]:
    """Return the parameters of the module with the innermost method in ``forward``."""
    # Partials of wrappers. The wrapped method is args[0].
    while hasattr(forward, "args") and hasattr(forward, "func"):
        forward = forward.args[0]
    owner = getattr(forward, "__self__", None)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []
