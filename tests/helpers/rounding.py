"""Bounds of the difference between two trainings of the same arithmetic in low precision, which
round elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import stdev
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEEDS = 8
"""Trainings that round at random, of which standard deviations are taken."""
STUDENT_T = 5.41
"""Two-sided 99.9 % of Student's t with 7 degrees of freedom: within so many standard deviations,
each of them from 8 runs, a value lies around a known center."""
_EXACT = {"_to_copy", "abs", "clone", "copy", "copy_", "fill_", "neg", "zero_", "zeros_like"}
"""Element-wise operators that round nothing, or round in a compiled graph as they do alone."""


class RandomRounding(TorchDispatchMode):
    """Round the element-wise results in bf16 at random, without bias: those that a compiler fuses.

    A graph and eager mode, each rounding to the nearest at places of its own, differ by two errors
    of d^2 / 12 a place, with a step d between values. So a value moves by a step up or down, each
    with a probability of 1 / 12.

    Args:
        seed: Of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags and func.overloadpacket.__name__ not in _EXACT:
            for result in tree_leaves(out):
                if isinstance(result, Tensor) and result.dtype is torch.bfloat16:
                    self._move(result.detach())
        return out

    def _move(self, values: Tensor) -> None:
        random = torch.rand(values.shape, generator=self._generator)
        steps = (random < 1 / 12).to(torch.int16) - (random > 11 / 12).to(torch.int16)
        # The bits of neighboring numbers of one sign are neighboring integers; 0 has two signs.
        values.view(torch.int16).add_(steps * (values != 0))


def spreads(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the standard deviation of each value over ``SEEDS`` runs."""
    return [stdev(values) for values in zip(*runs, strict=True)]


@contextmanager
def formulas_of_graphs() -> Iterator[None]:
    """Inside the block eager mode computes norms, rotations and SwiGLU by the operations that
    compiled graphs have for them, in place of autograd functions that round elsewhere.
    """
    compiling = ModuleType("torch")
    compiling.__dict__.update(
        vars(torch), compiler=SimpleNamespace(is_compiling=lambda: True)
    )  # fmt: skip
    with ExitStack() as stack:
        for module in ("activation", "norm", "attention.rotary"):
            stack.enter_context(patch(f"megatron_lightning.layers.{module}.torch", compiling))
        yield
