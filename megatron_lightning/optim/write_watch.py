"""Detect lost writes into tensors overwritten by the next step, without waiting for the device.

Writes into certain parameters cannot be taken over before a step: quantized data have fewer bits
than the main params, and full matrices have shards on other ranks. Column sums at the end of a step
are compared on the device before the next step. The host reads the answer a step later, without a
wait. On CPUs the host reads the answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.stepping.column_sums import column_sums


class WriteWatch:
    """Watches tensors on this rank between steps."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None

    def record(self, tensors: Sequence[Tensor]) -> None:
        """Record the tensors at the end of a step or of a take-over."""
        self._seen = [_sums(tensor) for tensor in tensors]

    def forget(self) -> None:
        """Forget the record, because the tensors have been replaced."""
        self._seen = []

    def was_written(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether any tensor was written since :meth:`record`. Waits for the device."""
        changed = self._compare(tensors)
        return changed is not None and bool(changed.any())

    def look(self, tensors: Sequence[Tensor], names: Sequence[str], why: str) -> None:
        """Look before a step whether a tensor was written since :meth:`record`.

        Args:
            tensors: In the order of :meth:`record`.
            names: Names of the tensors' parameters.
            why: The reason for the loss of writes, and the settings to change.

        Raises:
            ConfigError: If a tensor was written. On GPUs at the next call.
        """
        self._raise_if(names, why)
        changed = self._compare(tensors)
        if changed is None:
            return
        if not changed.is_cuda:
            self._answer = changed, None
            self._raise_if(names, why)
            return
        host = torch.empty(changed.shape, dtype=changed.dtype, pin_memory=True)
        host.copy_(changed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._answer = host, event

    def _compare(self, tensors: Sequence[Tensor]) -> Tensor | None:
        if not self._seen or len(self._seen) != len(tensors):
            return None
        pairs = zip(tensors, self._seen, strict=True)
        return torch.stack([(_sums(tensor) != sums_seen).any() for tensor, sums_seen in pairs])

    def _raise_if(self, names: Sequence[str], why: str) -> None:
        if self._answer is None:
            return
        changed, event = self._answer
        self._answer = None
        if event is not None:
            event.synchronize()  # recorded a step ago
        listed = [
            name for name, is_written in zip(names, changed.tolist(), strict=True) if is_written
        ]
        if listed:
            raise ConfigError(
                f"{', '.join(listed[:3])}{', …' if len(listed) > 3 else ''}: written between two "
                f"steps of an epoch. {why}"
            )


def _sums(tensor: Tensor) -> Tensor:
    return column_sums(tensor.detach().contiguous().view(-1))
