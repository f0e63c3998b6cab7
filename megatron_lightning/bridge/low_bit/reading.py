"""Read folders of compressed-tensors and ModelOpt: a box is computed from the codes and scales of
the box.

The tensors beside a layer's codes say the format:

    codes                     scales             outer scale
    weight_packed uint8       e4m3               weight_global_scale, a divisor    nvfp4
    weight uint8              e4m3               weight_scale_2, a factor          nvfp4 (ModelOpt)
    weight_packed uint8       uint8 (e8m0)       -                                 mxfp4
    weight e4m3               uint8 (e8m0)       -                                 mxfp8
    weight e4m3, int8         floating           -                                 fp8, int8
    weight_packed int32       floating           -                                 int4, int8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.precision.formats import unpack_e2m1

_LEFT_OUT = (
    ".weight_scale", ".weight_global_scale", ".weight_scale_2", ".weight_shape", ".input_scale",
    ".input_global_scale", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
_UNREAD = (".weight_zero_point", ".weight_g_idx")
_WORD = 32  # bits

Codes = Callable[[Box], Tensor]


def dequantized(folder: FolderTensors, settings: Mapping[str, Any]) -> dict[str, Lazy]:
    """Return the tensors of a folder in few bits as tensors in bf16.

    Args:
        folder: The folder.
        settings: ``quantization_config`` of the folder's config.json.

    Raises:
        ConfigError: If the folder has zero points or an order of columns.
        CheckpointError: If codes have no scales, or scales of another shape.
    """
    tensors: dict[str, Lazy] = {}
    sizes = _block_structure(settings)
    for name, lazy in folder.tensors.items():
        if name.endswith(_UNREAD):
            raise ConfigError(
                f"{folder.path}: {name} belongs to an asymmetric or reordered format, which is "
                "not read. Load the folder with transformers, dequantize it, and save it in bf16."
            )
        path, _, leaf = name.rpartition(".")
        scales = folder.tensors.get(f"{path}.weight_scale")
        if name.endswith(_LEFT_OUT):
            continue
        if leaf not in ("weight", "weight_packed") or scales is None:
            if leaf == "weight_packed" or (lazy.dtype.itemsize == 1 and leaf == "weight"):
                raise CheckpointError(
                    f"{folder.path}: {name} is in {lazy.dtype} and has no {path}.weight_scale. "
                    "Download or restore the folder."
                )
            tensors[name] = lazy
            continue
        columns, codes = _codes(folder, path, lazy)
        shape = (lazy.shape[0], columns)
        block = _block(folder, name, shape, scales, sizes)
        factors = partial(_factors, folder, path, scales)
        fill = partial(_fill, codes, factors, block)
        tensors[f"{path}.weight"] = Lazy(shape, torch.bfloat16, fill)
    return tensors


def _block_structure(settings: Mapping[str, Any]) -> list[int] | None:
    groups = (settings.get("config_groups") or {}).values()
    sizes = ((group.get("weights") or {}).get("block_structure") for group in groups)
    return next((list(size) for size in sizes if size), None)


def _codes(folder: FolderTensors, path: str, data: Lazy) -> tuple[int, Codes]:
    """Return the columns of a weight, and the codes of a box."""
    width = data.shape[-1]
    if data.dtype == torch.uint8:
        return 2 * width, partial(_unpacked, data, 2, lambda x: unpack_e2m1(x, 2 * x.shape[-1]))
    if data.dtype != torch.int32:
        return width, lambda box: data.read(box).float()
    columns = int(folder.tensors[f"{path}.weight_shape"].read()[1])
    bits = next((bits for bits in (8, 4) if -(-columns * bits // _WORD) == width), None)
    if bits is None:
        raise ConfigError(
            f"{folder.path}: {path}.weight_packed has {width} words for {columns} integers, which "
            "is neither 8 nor 4 bits each. Load the folder with transformers, dequantize it, and "
            "save it in bf16."
        )
    return columns, partial(_unpacked, data, _WORD // bits, partial(_integers, bits))


def _integers(bits: int, words: Tensor) -> Tensor:
    """Return signed integers of words: [R, n] -> [R, n * 32 / bits]."""
    shifts = torch.arange(0, _WORD, bits)
    codes = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).flatten(-2).float()


def _unpacked(data: Lazy, count: int, unpack: Callable[[Tensor], Tensor], box: Box) -> Tensor:
    """Return the codes of a box, of which ``count`` share an element."""
    (row, column), (rows, columns) = box
    first, last = column // count, -(-(column + columns) // count)
    codes = unpack(data.read(Box((row, first), (rows, last - first))))
    return codes.narrow(-1, column - first * count, columns)


def _block(
    folder: FolderTensors,
    name: str,
    shape: tuple[int, int],
    scales: Lazy,
    sizes: list[int] | None,
) -> tuple[int, int]:
    """Return the values of a scale along both dims."""
    grid = (1, 1) if scales.numel() == 1 else tuple(scales.shape)
    # A folder of several formats names the blocks of one of them, and others divide the weight.
    tried: list[Sequence[int | None]] = [(None, None)]
    if sizes is not None and len(sizes) == len(shape):
        tried.insert(0, sizes)
    for named in tried:
        block = tuple(
            extent if count == 1 else size or max(1, extent // max(1, count))
            for extent, count, size in zip(shape, grid, named, strict=True)
        ) if len(grid) == len(shape) else ()  # fmt: skip
        expected = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=False))
        if expected == grid:
            break
    else:
        raise CheckpointError(
            f"{folder.path}: {name} of {list(shape)} values has scales of shape "
            f"{list(scales.shape)}, which are not those of its format. Download or restore the "
            "folder."
        )
    rows, columns = block
    return rows, columns


def _factors(folder: FolderTensors, path: str, scales: Lazy, grid: Box) -> Tensor:
    """Return the factors of a box of the grid of scales, in fp32."""
    if scales.numel() == 1:
        grid = Box.full(tuple(scales.shape))
    values = scales.read(grid)
    if values.dtype == torch.uint8:
        exponents: Tensor = values.view(torch.float8_e8m0fnu)
        return exponents.float()
    factors = values.float()
    divisor = folder.tensors.get(f"{path}.weight_global_scale")
    factor = folder.tensors.get(f"{path}.weight_scale_2")
    if divisor is not None:
        factors = factors / divisor.read().reshape(())
    elif factor is not None:
        factors = factors * factor.read().reshape(())
    return factors.reshape(1, 1) if scales.numel() == 1 else factors


def _fill(
    codes: Codes, factors: Callable[[Box], Tensor], block: tuple[int, int], box: Box, out: Tensor
) -> None:
    starts = tuple(o // size for o, size in zip(box.offset, block, strict=True))
    ends = (-(-(o + n) // size) for o, n, size in zip(box.offset, box.shape, block, strict=True))
    grid = Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
    scales = factors(grid)
    for dim in (0, 1):
        scales = scales.repeat_interleave(block[dim], dim)
        scales = scales.narrow(dim, box.offset[dim] - starts[dim] * block[dim], box.shape[dim])
    out.copy_(codes(box) * scales)
