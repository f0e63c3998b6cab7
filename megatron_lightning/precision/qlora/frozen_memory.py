"""Memory of a frozen weight: quantized data and scales.

Shapes: a weight [..., R, C], in the blocks of :func:`~megatron_lightning.precision.quantize` with
the recipe's defaults: each scale belongs to neighboring values of one row.

    format     data                     scales                        row scales
    blockwise  uint8 [..., R, C]        fp32 [..., R, ceil(C / 128)]
    mxfp8      uint8 [..., R, C]        uint8 [..., R, ceil(C / 32)]
    nvfp4      uint8 [..., R, C / 2]    uint8 [..., R, ceil(C / 16)]  fp32 [..., R, 1]

Data and scales are bytes of e4m3, e8m0 and packed e2m1, since gloo and views of FSDP2 know no
floats of 8 bits. With nvfp4 all rows of a matrix have the matrix's scale, so that rows can be
divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.formats import pack_e2m1, unpack_e2m1
from megatron_lightning.precision.qlora.base_formats import BaseFormat
from megatron_lightning.precision.quantization import TwoLevelScales, encode
from megatron_lightning.precision.recipes import BLOCK_SIZES, FP8Recipe
from megatron_lightning.precision.scaling import Block, values_of

_CHUNK, _CHUNK_OF_GPU = 1 << 18, 1 << 24
"""Values to convert at a time: in caches of a CPU, in few launches on a GPU. In between a value
takes about 30 bytes."""


class FrozenMemory(NamedTuple):
    """Quantized data and scales of a weight, or of a part of a weight."""

    data: Tensor
    scales: Tensor
    row_scales: Tensor | None
    """None: the format has no scales of rows."""

    @classmethod
    def zeros(
        cls, name: BaseFormat, shape: Sequence[int], device: torch.device | str
    ) -> FrozenMemory:
        """Return the memory of a weight with zeros.

        Raises:
            ConfigError: If a row cannot be packed.
        """
        *rows, columns = shape
        if name == "nvfp4" and columns % 2:
            raise ConfigError(
                f"a weight of shape {tuple(shape)} has {columns} columns, and two values of nvfp4 "
                "share a byte. Set base to mxfp8 or blockwise."
            )
        num_scales = -(-columns // BLOCK_SIZES[name])
        width = columns // values_of_byte(name)
        kind = torch.float32 if name == "blockwise" else torch.uint8
        return cls(
            torch.zeros(*rows, width, dtype=torch.uint8, device=device),
            torch.zeros(*rows, num_scales, dtype=kind, device=device),
            torch.zeros(*rows, 1, device=device) if name == "nvfp4" else None,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> FrozenMemory:
        """Return the memory with each tensor changed."""
        rows = None if self.row_scales is None else change(self.row_scales)
        return FrozenMemory(change(self.data), change(self.scales), rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the format has."""
        return [tensor for tensor in self if tensor is not None]

    def num_columns(self, name: BaseFormat) -> int:
        """Return the number of values of a row."""
        return self.data.shape[-1] * values_of_byte(name)

    def columns(self, name: BaseFormat, first: int, last: int) -> FrozenMemory:
        """Return the columns ``first`` to ``last`` - 1, from the start of a block to the end of a
        block.
        """
        width, size = values_of_byte(name), BLOCK_SIZES[name]
        return FrozenMemory(
            self.data[..., first // width : last // width],
            self.scales[..., first // size : -(-last // size)],
            self.row_scales,
        )

    def write(self, name: BaseFormat, values: Tensor, amax: Tensor | None) -> None:
        """Quantize ``values`` [..., R, C] into the memory.

        Args:
            name: The format.
            values: The values.
            amax: Amax of each matrix [..., 1, 1] with nvfp4, else None.
        """
        if self.data.dim() > 2 and not self.data.is_contiguous():  # rows of several matrices
            for index, matrix in enumerate(values):
                own_amax = None if amax is None else amax[index]
                self.map(lambda x, index=index: x[index]).write(name, matrix, own_amax)  # type: ignore[misc]
            return
        recipe, block = FP8Recipe(scaling=name), Block(1, BLOCK_SIZES[name])
        per_row = None if amax is None else amax.expand(*values.shape[:-1], 1).reshape(-1, 1)
        rows = values.reshape(-1, values.shape[-1])
        targets = self.map(lambda x: x.view(-1, x.shape[-1]))
        for chunk in _row_chunks(rows):
            shared_rows = None if per_row is None else per_row[chunk]
            data, scales = encode(rows[chunk], recipe, "input", block, shared_amax=shared_rows)
            if isinstance(scales, TwoLevelScales):
                data = pack_e2m1(data)
                if targets.row_scales is not None:
                    targets.row_scales[chunk] = scales.tensor
                scales = scales.blocks
            targets.data[chunk] = data.view(torch.uint8)
            targets.scales[chunk] = (
                scales if scales.dtype.itemsize > 1 else scales.view(torch.uint8)
            )

    def read(self, name: BaseFormat, dtype: torch.dtype) -> Tensor:
        """Return the values of all rows as a matrix [rows, C]."""
        columns = self.num_columns(name)
        num_rows = math.prod(self.data.shape[:-1])
        out = torch.empty(num_rows, columns, dtype=dtype, device=self.data.device)
        memory = self.map(lambda x: x.reshape(-1, x.shape[-1]))
        for chunk in _row_chunks(out):
            out[chunk] = memory.map(lambda x, chunk=chunk: x[chunk])._decoded(name)  # type: ignore[misc]
        return out

    def _decoded(self, name: BaseFormat) -> Tensor:
        """Return fp32 values [r, C] of rows."""
        data, scales, row_scales = self
        block = Block(1, BLOCK_SIZES[name])
        if row_scales is not None:
            factors = scales.view(torch.float8_e4m3fn).float() * row_scales
            return values_of(unpack_e2m1(data, self.num_columns(name)), factors, block)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        return values_of(data.view(torch.float8_e4m3fn), scales.float(), block)


def values_of_byte(name: BaseFormat) -> int:
    """Return the number of values in a byte of data."""
    return 2 if name == "nvfp4" else 1


def _row_chunks(rows: Tensor) -> list[slice]:
    """Return slices of the rows of a matrix to convert at a time."""
    size = _CHUNK_OF_GPU if rows.is_cuda else _CHUNK
    step = max(1, size // max(1, rows.shape[1]))
    return [slice(start, start + step) for start in range(0, len(rows), step)]
