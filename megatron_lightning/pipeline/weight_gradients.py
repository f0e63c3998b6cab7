"""Weight gradients that are computed later than the gradients of inputs: the second half of a split backward.

The backward of a linear layer Y = X W^T has two independent products: dX = dY W, which the stage before waits for, and
dW = dY^T X, which nobody waits for ("Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241, section 2). While
a store collects, layers hand it the second product as a function; the store calls it when the schedule says so.

The graph is walked once, in the first half, so custom functions, collectives and recomputed activations run once. A product
enters autograd at the parameter itself: hooks fire, and gradients are summed in the dtype and the order of a whole backward.
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
from megatron_lightning.errors import PipelineError

Key = tuple[int, int]
"""Stage and micro-batch."""
_Product = tuple[nn.Parameter, Callable[[], Tensor]]


class Holder(Protocol):
    """What refers to the memory of a parameter from step to step."""

    def renew(self) -> None:
        """Look at the parameter again."""
        ...


class WeightGradients:
    """Store of the products that the layers of one rank have put off."""

    def __init__(self) -> None:
        self._put_off: dict[Key, deque[_Product]] = {}
        self._open: deque[_Product] | None = None
        self.holders: WeakSet[Holder] = WeakSet()
        """Who wants to know that a step begins."""

    def __deepcopy__(self, memo: object) -> WeightGradients:
        return self  # modules that refer to the store are copied by callbacks (weight averaging); what is put off is not

    @property
    def collecting(self) -> bool:
        """Whether a backward runs whose weight gradients are wanted later."""
        return self._open is not None

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Around the backward of a stage and micro-batch: its weight gradients are put off until :meth:`compute`."""
        self._open = self._put_off[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def begin(self) -> None:
        """Begin a step, before its first forward."""
        for holder in self.holders:
            holder.renew()

    def deliver(self, parameter: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Put off the gradient of ``parameter`` that ``product`` returns; outside of a split backward, compute it."""
        if self.collecting:
            self.put_off(parameter, product)
        else:
            torch.autograd.backward(parameter, product())

    def put_off(self, parameter: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Compute the gradient of ``parameter`` later.

        Args:
            parameter: What the gradient is of.
            product: Returns the gradient, in the parameter's shape; called once, without autograd.

        Raises:
            PipelineError: If no backward is being split.
        """
        if self._open is None:
            raise PipelineError("a weight gradient was put off outside of a split backward, so nobody would compute it.")
        self._open.append((parameter, product))

    def compute(self, key: Key) -> None:
        """Compute what was put off for a stage and micro-batch, in the order in which backward came to it."""
        products = self._put_off.pop(key)
        while products:
            parameter, product = products.popleft()
            with torch.no_grad():
                gradient = product()
            del product  # its activations are let go before the next one is computed
            compat.run_backward((parameter,), (gradient,))

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._put_off.clear()
        self._open = None
