"""Deferred weight gradients: the second half of a split backward.

The backward of a linear layer Y = X W^T has two independent products: dX = dY W, which the stage
before waits for, and dW = dY^T X, which nobody waits for ("Zero Bubble Pipeline Parallelism",
https://arxiv.org/abs/2401.10241, section 2). While a store collects, layers give it the second
product as a function; the store calls it at the scheduled action.

The graph is walked once, in the first half, so custom functions, collectives and recomputed
activations run once. A product enters autograd at the parameter itself: hooks fire, and gradients
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
_Product = tuple[nn.Parameter, Callable[[], Tensor]]


class Holder(Protocol):
    """Object that refers to the memory of a parameter from step to step."""

    def renew(self) -> None:
        """Read the parameter's memory again."""
        ...


class WeightGradients:
    """Store of the products that the layers of one rank have deferred."""

    def __init__(self) -> None:
        self._deferred: dict[Key, deque[_Product]] = {}
        self._open: deque[_Product] | None = None
        self.holders: WeakSet[Holder] = WeakSet()
        """Objects to renew when a run begins."""

    def __deepcopy__(self, memo: object) -> WeightGradients:
        # Modules that refer to the store are copied by callbacks (weight averaging); the store is
        # not.
        return self

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Defer the weight gradients of one stage and micro-batch, whose backward runs inside,
        until :meth:`compute`.
        """
        self._open = self._deferred[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def begin(self) -> None:
        """Begin a run, before its first forward."""
        for holder in self.holders:
            holder.renew()

    def deliver(self, parameter: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Defer the gradient of ``parameter`` that ``product`` returns; outside of a split
        backward, compute it.
        """
        if self._open is None:
            torch.autograd.backward(parameter, product())
        else:
            self._open.append((parameter, product))

    def compute(self, key: Key) -> None:
        """Compute the deferred gradients of one stage and micro-batch, in the order of their
        backward.
        """
        products = self._deferred.pop(key)
        while products:
            parameter, product = products.popleft()
            with torch.no_grad():
                gradient = product()
            del product  # releases its activations before the next one is computed
            compat.run_backward((parameter,), (gradient,))

    def clear(self) -> None:
        """Drop everything, after a run that failed."""
        self._deferred.clear()
        self._open = None
