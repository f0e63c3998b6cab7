"""Folders with weights in 8 or 4 bits as folders in bf16: a box is computed from the quantized data
and scales of the box.

* ``fp8`` (DeepSeek): ``X.weight`` in float8 and ``X.weight_scale_inv``, one factor for each block
  of ``weight_block_size`` (https://arxiv.org/abs/2412.19437, section 3.3.2), or one for all.
* ``mxfp4`` (gpt-oss): ``X_blocks`` and ``X_scales``, two E2M1 numbers a byte, the lower bits first,
  and a power of two for each group of 32 numbers (OCP Microscaling Formats 1.0, section 5.3). The
  folder has every expert as [rows, columns], and the model as [columns, rows].
* ``compressed-tensors`` and ``modelopt``: see :mod:`megatron_lightning.bridge.low_bit.reading`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from megatron_lightning.bridge.folders.configuration import add_rope_schema
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.folders.safetensors_file import StoredTensor
from megatron_lightning.bridge.low_bit.reading import dequantized
from megatron_lightning.bridge.low_bit.stacks import STACKED_EXPERTS, stacked
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import CONFIG, MODELOPT_CONFIG, WEIGHTS_INDEX
from megatron_lightning.parallel.shards.spec import Box, Shape

METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
"""Supported values of ``quant_method``."""
_SCALE = "_scale_inv"
_LEFT_OUT = (".activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale")
_FIXED_SCALES = (*_LEFT_OUT, ".input_global_scale")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32  # numbers of MXFP4 sharing a scale


class DequantizedFolder(FolderTensors):
    """A quantized folder as a folder in bf16, with new file names.

    Args:
        folder: The quantized folder.
        settings: ``quantization_config`` of the folder's config.json.

    Raises:
        ConfigError: If the method of quantization is unknown here.
        CheckpointError: If quantized data and scales do not fit.
    """

    def __init__(self, folder: FolderTensors, settings: Mapping[str, Any]) -> None:
        super().__init__(folder.path)
        self._source = folder
        method = settings.get("quant_method")
        if method not in METHODS:
            raise ConfigError(
                f"{folder.path} has weights quantized by {method!r}, and {', '.join(METHODS)} are "
                "read. Load it with transformers, dequantize it (model.dequantize()), and save it "
                "in bf16: model.save_pretrained(folder)."
            )
        dequantize = {"fp8": _fp8, "mxfp4": _mxfp4}.get(str(method), dequantized)
        config = json.loads(folder.files.contents[CONFIG])
        self._made = stacked(dequantize(folder, settings), config.get(STACKED_EXPERTS, ()))
        table = {name: (tuple(x.shape), x.dtype) for name, x in self._made.items()}
        files = new_files(table)
        for file, header in files.headers.items():
            self.add_file(file, header)
        self._files = _dequantized_files(folder.files, files.index_file)
        if not getattr(rank_zero_only, "rank", None):  # unset without ranks
            has_others = any(name.endswith(_FIXED_SCALES) for name in folder.tensors)
            warnings.warn(
                f"{folder.path} has weights in {method}. They are dequantized, trained in the "
                "precision of the Trainer, and exported in bf16."
                f"{' Its scales of inputs, keys and values are left out.' if has_others else ''}",
                stacklevel=2,
            )

    @property
    def bytes_read(self) -> int:
        """Bytes of quantized data and scales read so far."""
        count: int = getattr(self._source, "bytes_read", 0)
        return count

    @property
    def files(self) -> KeptFiles:
        """All other files: configuration without quantization, tokenizer, licences."""
        return self._files

    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        self._made[stored.name].fill(box, out)


def quantization_of(config: Path) -> Mapping[str, Any] | None:
    """Return ``quantization_config`` of a config.json. None: weights are not quantized."""
    settings = json.loads(config.read_bytes()).get("quantization_config")
    return settings if isinstance(settings, dict) else None


def _dequantized_files(files: KeptFiles, index: bytes | None) -> KeptFiles:
    left_out = (WEIGHTS_INDEX, MODELOPT_CONFIG)
    contents = {name: c for name, c in files.contents.items() if name not in left_out}
    config = json.loads(contents[CONFIG])
    del config["quantization_config"]
    config.pop(STACKED_EXPERTS, None)
    config |= dict.fromkeys({"dtype", "torch_dtype"} & set(config) or {"dtype"}, "bfloat16")
    add_rope_schema(config)
    contents[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    return KeptFiles(contents if index is None else {**contents, WEIGHTS_INDEX: index})


# --------------------------------------------------------------------------------------------- fp8


def _fp8(folder: FolderTensors, settings: Mapping[str, Any]) -> dict[str, Lazy]:
    block = settings.get("weight_block_size")
    tensors = {}
    for name, lazy in folder.tensors.items():
        scale = folder.tensors.get(name + _SCALE)
        if scale is not None:
            fill = partial(_fill_fp8, lazy, scale, _block(folder, name, scale, block))
            tensors[name] = Lazy(lazy.shape, torch.bfloat16, fill)
        elif name.endswith((_SCALE, *_LEFT_OUT)):
            continue
        elif lazy.dtype.itemsize == 1 and lazy.dtype.is_floating_point:
            raise CheckpointError(
                f"{folder.path}: {name} is in {lazy.dtype} and has no {name}{_SCALE}. Download or "
                "restore the folder."
            )
        else:
            tensors[name] = lazy
    return tensors


def _block(folder: FolderTensors, name: str, scale: Lazy, block: Any) -> Shape:
    """Return the shape of the blocks sharing a factor."""
    shape = tuple(folder.tensors[name].shape)
    if scale.numel() == 1:
        return shape
    sizes = tuple(block or ())
    expected = (
        tuple(-(-n // size) for n, size in zip(shape[-2:], sizes, strict=True))
        if len(shape) >= 2 and len(sizes) == 2 and all(isinstance(s, int) and s > 0 for s in sizes)
        else None
    )
    if expected is None or tuple(scale.shape) != (*shape[:-2], *expected):
        raise CheckpointError(
            f"{folder.path}: {name} of shape {list(shape)} has scales of shape "
            f"{list(scale.shape)}, which are not those of blocks of {block}. Download or restore "
            "the folder."
        )
    return (*(1 for _ in shape[:-2]), *sizes)


def _fill_fp8(data: Lazy, scales: Lazy, block: Shape, box: Box, out: Tensor) -> None:
    values = data.read(box).to(torch.float32)
    if scales.numel() == 1:
        out.copy_(values * scales.read().to(torch.float32).reshape(()))
        return
    starts = tuple(o // size for o, size in zip(box.offset, block, strict=True))
    ends = (-(-(o + n) // size) for o, n, size in zip(box.offset, box.shape, block, strict=True))
    grid = Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
    factors = scales.read(grid).to(torch.float32)
    for dim in (-2, -1):
        factors = factors.repeat_interleave(block[dim], dim)
        first = box.offset[dim] - starts[dim] * block[dim]
        factors = factors.narrow(dim, first, box.shape[dim])
    out.copy_(values * factors)


# ------------------------------------------------------------------------------------------- mxfp4


def _mxfp4(folder: FolderTensors, settings: Mapping[str, Any]) -> dict[str, Lazy]:
    tensors = {}
    for name, lazy in folder.tensors.items():
        short = name.removesuffix("_blocks")
        scales = folder.tensors.get(f"{short}_scales")
        if short != name and scales is not None:
            if (
                tuple(lazy.shape[:-1]) != tuple(scales.shape)
                or lazy.ndim != 4
                or lazy.shape[-1] != _GROUP // 2
                or {lazy.dtype, scales.dtype} != {torch.uint8}
            ):
                raise CheckpointError(
                    f"{folder.path}: {name} of shape {list(lazy.shape)} in {lazy.dtype} has scales "
                    f"of shape {list(scales.shape)} in {scales.dtype}, and MXFP4 has 16 bytes for "
                    "each of them. Download or restore the folder."
                )
            experts, rows, groups, _ = lazy.shape
            shape = (experts, groups * _GROUP, rows)
            tensors[short] = Lazy(shape, torch.bfloat16, partial(_fill_mxfp4, lazy, scales))
        elif not (
            name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in folder.tensors
        ):
            tensors[name] = lazy
    return tensors


def _fill_mxfp4(blocks: Lazy, scales: Lazy, box: Box, out: Tensor) -> None:
    (expert, column, row), (num_experts, num_columns, num_rows) = box
    first, last = column // _GROUP, -(-(column + num_columns) // _GROUP)
    groups = Box((expert, row, first), (num_experts, num_rows, last - first))
    data = blocks.read(Box((*groups.offset, 0), (*groups.shape, _GROUP // 2)))
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    pairs = torch.stack([table[(data & 15).long()], table[(data >> 4).long()]], -1)
    exponents = scales.read(groups).to(torch.int32) - 127
    values = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1)).flatten(-2)
    columns = values.narrow(-1, column - first * _GROUP, num_columns)
    out.copy_(columns.transpose(1, 2))
