"""Quantize a weight shard by shard, so that the FP8 data can be all-gathered
(:mod:`megatron_lightning.precision.quantized_data`).

The data are bit-equal to the data that the layer's GEMMs quantize from the full weight. Row-wise
and column-wise data therefore have to be equal: recipes with one scale a tensor, or with square
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.layers.linear.transposed import (
    TransposedColumnParallelLinear,
    TransposedRowParallelLinear,
)
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.parameters import num_names
from megatron_lightning.parallel.shards.stored_weight import stored_part
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.formats import DTYPES, cast
from megatron_lightning.precision.quantization import block_of, encode
from megatron_lightning.precision.scaling import amax_of, scales_of, to_blocks


def weight_quantizers(
    module: nn.Module, quantized: Mapping[str, EmulatedGemm]
) -> dict[str, RecipeQuantizer]:
    """Return quantizers of untied weights, in the layout that the layer's GEMMs use, by parameter
    name.

    Args:
        module: Holds the layers.
        quantized: Layer path -> GEMMs of the layer.
    """
    uses = num_names(module)
    quantizers = {}
    for path, gemm in quantized.items():
        layer = module.get_submodule(path)
        weight = layer._parameters.get("weight")
        turned = isinstance(layer, TransposedColumnParallelLinear | TransposedRowParallelLinear)
        if weight is None or uses[id(weight)] > 1 or turned or stored_part(weight) is not None:
            continue
        quantizers[f"{path}.weight"] = RecipeQuantizer(gemm, tuple(weight.shape))
    return quantizers


class _Window(NamedTuple):
    """Full block rows of one matrix around a range of the weight."""

    place: slice
    """Place of the matrix's values in the range."""
    offset: int
    """Offset of the values in the window."""
    shape: tuple[int, int]
    scales: slice
    """Place of the window's blocks in the table of scales."""


class RecipeQuantizer:
    """Quantizer of the weight [out, in] or [E, out, in] of a layer.

    Args:
        gemm: GEMMs of the layer.
        shape: Shape of the weight on this rank.
    """

    def __init__(self, gemm: EmulatedGemm, shape: tuple[int, ...]) -> None:
        self._gemm = gemm
        self._recipe = recipe = gemm.recipe
        self._block = block_of(recipe, "weight")
        self._matrices, self._rows, self._columns = math.prod(shape[:-2]), *shape[-2:]
        if recipe.scaling == "delayed":  # one scale for all experts
            self._matrices, self._rows = 1, self._matrices * self._rows
        height, width = self._block.rows or self._rows, self._block.columns or self._columns
        self._grid = (-(-self._rows // height), -(-self._columns // width))
        self._stacked = len(shape) > 2
        self.num_scales = self._matrices * math.prod(self._grid)
        """See ``WeightQuantizer`` in ``precision.quantized_data``, also for the rest."""
        self.dtype = DTYPES[recipe.data_format("weight")]
        self.group: AxisGroup | None = gemm.group if recipe.scaling == "current" else None

    def _windows(self, start: int, size: int) -> Iterator[_Window]:
        """Yield the windows of a range, one window a matrix."""
        per_matrix, num_scales = self._rows * self._columns, math.prod(self._grid)
        position = start
        while position < start + size:
            index, first = divmod(position, per_matrix)
            last = min(first + start + size - position, per_matrix)
            place = slice(position - start, position - start + last - first)
            height = self._block.rows
            if height is None:  # all rows share a scale
                table = slice(index * num_scales, (index + 1) * num_scales)
                yield _Window(place, 0, (1, last - first), table)
            else:
                top = first // self._columns // height * height
                rows = min(
                    -(-(-(-last // self._columns) - top) // height) * height, self._rows - top
                )
                above = index * num_scales + top // height * self._grid[1]
                table = slice(above, above + -(-rows // height) * self._grid[1])
                yield _Window(place, first - top * self._columns, (rows, self._columns), table)
            position += last - first

    def _filled(self, values: Tensor, window: _Window) -> Tensor:
        """Return a window with the range's values, padded with zeros."""
        window_values = values[window.place].to(self._gemm.dtype)
        if len(window_values) == math.prod(window.shape):
            return window_values.view(window.shape)
        padded = window_values.new_zeros(math.prod(window.shape))
        padded[window.offset : window.offset + len(window_values)] = window_values
        return padded.view(window.shape)

    def amax(self, values: Tensor, start: int) -> Tensor:
        """Return the amax of every block within a range."""
        table = torch.zeros(self.num_scales, device=values.device)
        for window in self._windows(start, len(values)):
            blocks = to_blocks(self._filled(values, window), self._block)
            table[window.scales] = amax_of(blocks).flatten()
        return table

    def encode(self, values: Tensor, start: int, amax: Tensor) -> Tensor:
        """Return the quantized data of a range."""
        data = torch.empty(values.shape, dtype=self.dtype, device=values.device)
        for window in self._windows(start, len(values)):
            blocks = self._quantize(self._filled(values, window), amax[window.scales]).flatten()
            size = window.place.stop - window.place.start
            data[window.place] = blocks[window.offset : window.offset + size]
        return data

    def _quantize(self, window: Tensor, amax: Tensor) -> Tensor:
        if self._recipe.scaling == "delayed":
            factor = self._gemm.histories["weight"].factor.to(window.device)
            return cast(window.float() * factor, self._recipe.data_format("weight"))
        table = amax.view(-1, self._grid[1])
        return encode(window, self._recipe, "weight", self._block, shared_amax=table)[0]

    def set_scales(self, amax: Tensor) -> None:
        """Set the layer's scales from the reduced amax."""
        if self._recipe.scaling == "delayed":
            factor = self._gemm.histories["weight"].factor.to(amax.device)
            scales = factor.reciprocal().where(amax.isfinite(), torch.nan)
        else:
            name, rounds = self._recipe.data_format("weight"), self._recipe.rounds_scales
            _, scales = scales_of(amax, name, power_of_two=rounds)
        per_tensor = self._recipe.is_per_tensor and self._matrices == 1
        if per_tensor and (not self._stacked or self._recipe.scaling == "delayed"):
            scales, amax = scales.reshape(()), amax.reshape(())
        else:
            scales = scales.view(*((self._matrices,) * self._stacked), *self._grid)
        self._gemm.keep_scales(scales, amax)
