"""Dropout from a named random stream, for inputs that differ between the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.random.rng import RngStreams


def set_dropout(module: nn.Module, p: float) -> None:
    """Set the probability of all dropouts in a module: of torch, of this library, and on attributes
    of attention in ``transformers``.
    """
    for child in module.modules():
        if isinstance(child, Dropout | nn.modules.dropout._DropoutNd):
            child.p = p
        for name, value in vars(child).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(child, name, p)


class Dropout(nn.Module):
    """Dropout from torch's default generator, or from a named stream set by a plan.

    Args:
        p: Probability of a zero. 0 makes the layer the identity.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.streams: RngStreams | None = None
        self.stream_name = "model-parallel-rng"

    @property
    def active_p(self) -> float:
        """The probability, 0 in evaluation."""
        return self.p if self.training else 0.0

    @property
    def draws_from_stream(self) -> bool:
        """Whether something is drawn now, from a named stream."""
        return self.streams is not None and bool(self.active_p)

    def stream(self) -> AbstractContextManager[None]:
        """Return a context that draws from the right stream."""
        if self.streams is None or not self.active_p:
            return nullcontext()
        return self.streams.fork(self.stream_name)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with dropped entries. Any shape."""
        if not self.active_p:
            return x
        if self.streams is not None and torch.compiler.is_compiling():
            # A generator cannot be part of a graph. The mask equals the mask of the eager path
            # below.
            mask = self.streams.draw_kept(x, self.p, self.stream_name)
            return torch.where(mask, x / (1.0 - self.p), 0.0)
        with self.stream():
            return F.dropout(x, self.p)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Compute in eval mode inside the block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
