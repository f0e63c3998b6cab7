"""Broadcast small nested values from the last stage of a pipeline to the other stages, once a step.

A value is split into numbers and the rest (names, keyword arguments, structure). The numbers travel
as a float64 tensor. The rest changes rarely. A new rest is sent, and cached under a hash. Tensors
with dims follow separately.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup

_MAX_CACHED = 64  # structures. Outputs with texts have a new structure in every step


class _Number:
    """Placeholder of a number in the structure: how to make the number from a float64."""

    def __init__(self, value: Tensor | float) -> None:
        self.dtype = value.dtype if isinstance(value, Tensor) else type(value)

    def restore(self, tensor: Tensor, number: float) -> Any:
        return tensor.to(self.dtype) if isinstance(self.dtype, torch.dtype) else self.dtype(number)


class _Array:
    """Placeholder of a tensor with dims in the structure. The tensor's bytes follow."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, float | int) or (isinstance(leaf, Tensor) and leaf.ndim == 0)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, since backends support few dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _stacked(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return plain numbers and tensors of a single element as one tensor, with one copy to the
    device for all plain numbers.
    """
    floats = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
    stacked = torch.tensor(floats, dtype=torch.float64, device=device)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            stacked[index] = number.detach().to(torch.float64)
    return stacked


def _packed(structure: Any) -> bytes:
    try:
        return pickle.dumps(structure)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "the step returned or logged a value that cannot be sent to the other pipeline stages "
            f"({error}). Return and log tensors, numbers, strings and containers of them, and "
            "leave sync_dist_group out: values are reduced over the data-parallel ranks."
        ) from error


class StageBroadcast:
    """Broadcast of nested values from pp rank 0, the rank of the last stage."""

    def __init__(self, pipeline: AxisGroup, device: torch.device) -> None:
        self._pipeline = pipeline
        self._device = device
        self._structures: dict[int, bytes] = {}

    def __call__(self, value: tuple[Any, ...], *, without: int | None = None) -> Any:
        """Return the last stage's ``value`` (there unchanged). Other stages pass anything.

        ``without``: Index of an entry. Tensors with dims in the entry are None on the other stages.
        """
        if self._pipeline.size == 1:
            return value
        if self._pipeline.rank > 0:
            return self._receive()
        message = list(value)
        if without is not None:
            message[without] = tree_map_only(
                Tensor, lambda x: None if x.ndim else x, value[without]
            )
        self._send(tuple(message))
        return value

    def _send(self, value: Any) -> None:
        numbers = [leaf for leaf in tree_leaves(value) if _is_number(leaf)]
        packed = _packed(
            tree_map(
                lambda x: (
                    _Number(x) if _is_number(x) else _Array(x) if isinstance(x, Tensor) else x
                ),
                value,
            )
        )
        key = int.from_bytes(hashlib.sha1(packed).digest()[:7], "little")
        is_new = key not in self._structures
        self._broadcast(
            torch.tensor([key, len(numbers), len(packed) if is_new else 0], device=self._device)
        )
        if is_new:
            self._cache(key, packed)
            self._broadcast(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self._device))
        if numbers:
            self._broadcast(_stacked(numbers, self._device))
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.ndim:
                self._broadcast(_as_bytes(tensor.detach().to(self._device).contiguous()))

    def _receive(self) -> Any:
        key, count, packed_bytes = self._broadcast(
            torch.empty(3, dtype=torch.int64, device=self._device)
        ).tolist()
        if packed_bytes:
            packed = self._broadcast(
                torch.empty(packed_bytes, dtype=torch.uint8, device=self._device)
            )
            self._cache(key, packed.cpu().numpy().tobytes())
        numbers = self._receive_numbers(count)
        value = tree_map_only(
            _Number,
            lambda number: number.restore(*next(numbers)),
            pickle.loads(self._structures[key]),
        )
        return tree_map_only(_Array, self._receive_tensor, value)

    def _receive_numbers(self, count: int) -> Iterator[tuple[Tensor, float]]:
        """Return each number as a tensor and as a plain number."""
        if not count:
            return iter(())
        numbers = self._broadcast(torch.empty(count, dtype=torch.float64, device=self._device))
        return zip(numbers, numbers.tolist(), strict=True)

    def _receive_tensor(self, sent: _Array) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
        self._broadcast(_as_bytes(tensor))
        return tensor

    def _cache(self, key: int, packed: bytes) -> None:
        """Keep the newest structures. All stages drop the same structures."""
        self._structures[key] = packed
        if len(self._structures) > _MAX_CACHED:
            del self._structures[next(iter(self._structures))]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self._pipeline.ranks[0], group=self._pipeline.process_group)
        return tensor
