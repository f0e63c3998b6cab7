"""Deferred weight gradients: the second half of a split backward.

The backward of a linear layer Y = X W^T has two independent GEMMs: dX = dY W, awaited by the stage
before, and dW = dY^T X, awaited by no stage ("Zero Bubble Pipeline Parallelism",
https://arxiv.org/abs/2401.10241, section 2). While a store collects, layers hand the second GEMM to
the store as a function. The store calls the function at the scheduled action.

The graph is walked once, in the first half, so custom functions, collectives and recomputed
activations run once. A GEMM enters autograd at the parameter itself: hooks fire, and gradients
are summed in the dtype and the order of a full backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_lightning import compat

Key = tuple[int, int]
"""Stage and micro-batch."""
_Matmul = tuple[nn.Parameter, Callable[[], Tensor]]


class Holder(Protocol):
    """Object with a reference to the memory of a parameter from step to step."""

    def renew(self) -> None:
        """Read the parameter's memory again."""
        ...


class WeightGradients:
    """Store of the GEMMs deferred by the layers of a rank."""

    def __init__(self) -> None:
        self._deferred: dict[Key, deque[_Matmul]] = {}
        self._open: deque[_Matmul] | None = None
        self.holders: WeakSet[Holder] = WeakSet()
        """Objects to renew when a run begins."""

    def __deepcopy__(self, memo: object) -> WeightGradients:
        # Callbacks copy modules with references to the store (weight averaging). The store is not
        # copied.
        return self

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Defer the weight gradients of a stage and micro-batch until :meth:`compute`. The backward
        runs inside the block.
        """
        self._open = self._deferred[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def begin(self) -> None:
        """Begin a run, before the run's first forward."""
        for holder in self.holders:
            holder.renew()

    def deliver(self, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> None:
        """Defer the gradient of ``parameter`` returned by ``compute``. Outside of a split backward,
        compute the gradient.
        """
        if self._open is None:
            torch.autograd.backward(parameter, compute())
        else:
            self._open.append((parameter, compute))

    def compute(self, key: Key) -> None:
        """Compute the deferred gradients of a stage and micro-batch, in the order of the
        backward.
        """
        deferred = self._deferred.pop(key)
        while deferred:
            parameter, compute = deferred.popleft()
            with torch.no_grad():
                gradient = compute()
            del compute  # releases the activations before the next gradient is computed
            compat.run_backward((parameter,), (gradient,))

    def clear(self) -> None:
        """Drop everything, after a failed run."""
        self._deferred.clear()
        self._open = None
