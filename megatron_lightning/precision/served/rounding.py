"""When a model rounds its weights, and for how long a rounded weight is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lightning.layers.linear.kept_weight import KeptWeight
from megatron_lightning.precision.served.input_scales import InputScales


class Rounding:
    """The switch of a model, shared by all of its layers, however deep they are nested.

    Args:
        inputs: Fixed scales of inputs. None: there are none.
    """

    def __init__(self, inputs: InputScales | None = None) -> None:
        self.is_on = True
        """Whether weights are rounded."""
        self.inputs = inputs
        """Fixed scales of inputs. None: there are none."""
        self._keeps = False
        self._kept: dict[str, tuple[KeptWeight, tuple[KeptWeight, ...]]] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep rounded weights, until :meth:`forget`, for further micro-batches of a pipeline run
        and for backward.
        """
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def keep(self) -> None:
        """Keep rounded weights until :meth:`forget`, for a model whose weights do not change."""
        self._keeps = True

    def forget(self) -> None:
        """Drop kept weights before weights change."""
        self._kept.clear()

    def value(
        self,
        name: str,
        weight: Tensor,
        dtype: torch.dtype,
        rounded: Callable[[], Tensor],
        factors: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return a rounded weight, computed now or for an earlier micro-batch.

        Args:
            name: Name of the weight in the model.
            weight: The weight. One that is computed in the forward is not kept.
            dtype: Dtype of the rounded weight.
            rounded: Computes it.
            factors: Tensors of adapters in the weight. Their next values replace the kept ones.
        """
        if torch.compiler.is_compiling() or not weight.is_leaf:
            return rounded()
        kept, parts = self._kept.get(name, (None, ()))
        is_kept = (
            kept is not None
            and kept.is_of(weight)
            and len(parts) == len(factors)
            and all(part.is_of(factor) for part, factor in zip(parts, factors, strict=True))
        )
        if kept is not None and is_kept:
            if dtype not in kept.values:
                kept.values[dtype] = rounded()
            value: Tensor = kept.values[dtype]
            return value
        value = rounded()
        if self._keeps:
            kept = KeptWeight.of(weight)
            kept.values[dtype] = value
            self._kept[name] = kept, tuple(KeptWeight.of(factor) for factor in factors)
        return value
