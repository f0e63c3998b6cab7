"""Weights all-gathered as quantized data, in Transformer Engine's quantized tensors.

A module built inside ``quantized_model_init`` has quantized tensors in place of weights: 8-bit
data, scales, and transposed data for kernels that need a transpose. Here the data lies in the
all-gathered buffer (``replace_raw_data``), and the layer's parameter is a view of the same buffer:

    main params, fp32   of this rank's range, stepped by the optimizer
      | quantize_master_weights: ranks agree on scales, data of this rank's range
    all-gather          of quantized data, 1 byte a weight
      | post_all_gather_processing: transposed data, at the first forward
    module              multiplies. The gradient goes to the layer's parameter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.precision.quantized_data import LibraryQuantizer, Range, WeightRanges


class QuantizedWeight(LibraryQuantizer):
    """The weight [out, in] of a layer, or [E, out, in] of experts, as quantized tensors.

    Args:
        layer: The layer.
        tensors: Quantized tensors by name in the module: a single tensor, or a tensor for each
            expert.
        recipe: Transformer Engine's recipe of the tensors.
        utils: ``transformer_engine.pytorch.tensor.utils``.
    """

    dtype = torch.float8_e4m3fn

    def __init__(
        self, layer: nn.Module, tensors: Mapping[str, Any], recipe: Any, utils: Any
    ) -> None:
        self.layer = layer
        self.recipe = recipe
        self._tensors = tensors
        self.utils = utils
        self._data: Tensor | None = None
        self._is_processed = False

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = self.layer._parameters["weight"]  # type: ignore[assignment]
        return weight

    @property
    def holds_quantized(self) -> bool:
        """Whether the layer's parameter is currently quantized data."""
        return is_quantized(self._weight.dtype)

    @classmethod
    def quantize(cls, weights: Sequence[WeightRanges], group: AxisGroup) -> None:
        """See the base class. A call of Transformer Engine takes weights of a single recipe."""
        by_recipe: dict[int, list[WeightRanges]] = {}
        for weight in weights:
            by_recipe.setdefault(id(_of(weight).recipe), []).append(weight)
        for some in by_recipe.values():
            parts = [part for weight in some for part in _of(weight).parts(weight.ranges)]
            tensors, values, starts = map(list, zip(*parts, strict=True))
            _of(some[0]).utils.quantize_master_weights(
                tensors,
                values,
                starts,
                group.process_group,
                manual_post_all_gather_processing=True,
            )

    def parts(self, ranges: Sequence[Range]) -> list[tuple[Any, Tensor | None, int | None]]:
        """Return each quantized tensor before its update, with this rank's main params and their
        place in the tensor. None if this rank has none.

        ``ranges``: one range of the flattened weight, or none.
        """
        self._share_memory()
        self._is_processed = False
        shards: list[tuple[Any, Tensor | None, int | None]] = []
        begin = 0
        for tensor in self._tensors.values():
            end = begin + tensor.numel()
            part: tuple[Tensor | None, int | None] = None, None
            for start, values, _ in ranges:
                low, high = max(begin, start), min(end, start + len(values))
                if low < high:
                    part = values[low - start : high - start], low - begin
            shards.append((tensor, *part))
            begin = end
        return shards

    def _share_memory(self) -> None:
        """Bind the tensors' data to the memory of the layer's parameter."""
        data = self._weight.detach().view(torch.uint8)
        if self._data is not None and self._data.data_ptr() == data.data_ptr():
            return
        parts = data.unbind() if data.ndim > 2 else (data,)
        for tensor, part in zip(self._tensors.values(), parts, strict=True):
            self.utils.replace_raw_data(tensor, part)
        self._data = data

    def bound(self) -> dict[str, Tensor]:
        """Return the tensors for the module's forward.

        Their gradient is the parameter's gradient.
        """
        if not self._is_processed:
            # The processed tensors are kept for backward, also if an evaluation comes first.
            with torch.inference_mode(False), torch.no_grad():
                self.utils.post_all_gather_processing(list(self._tensors.values()))
            self._is_processed = True
        tensors = _Bound.apply(self._weight, list(self._tensors.values()))  # type: ignore[no-untyped-call]
        return dict(zip(self._tensors, tensors, strict=True))


def _of(weight: WeightRanges) -> QuantizedWeight:
    return cast(QuantizedWeight, weight.quantizer)


class _Bound(torch.autograd.Function):
    """Quantized tensors that pass their gradients to a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tensors: list[Any]) -> tuple[Any, ...]:
        ctx.is_stacked = weight.ndim > 2
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.stack(grads) if ctx.is_stacked else grads[0], None
