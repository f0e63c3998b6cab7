"""Size of the manifest of a save by many thousand ranks, made without them, and the time to write
and read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch

from megatron_lightning.checkpoint.format.manifest import (
    BLOCK_BYTES,
    Manifest,
    StoredShard,
    TensorInfo,
)
from megatron_lightning.parallel.shards.spec import Box, Shape, ShardSpec

TENSOR, PIPELINE = 8, 16
# Llama 3.1 405B.
NUM_LAYERS, HIDDEN, FFN, NUM_GROUPS, HEAD, VOCABULARY = 126, 16384, 53248, 8, 128, 128256
OPTIMIZER_KEYS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ManifestCost:
    """Cost of the manifest of one save."""

    num_ranks: int
    num_parameters: int
    num_shards: int
    num_bytes: int
    """Size of ``manifest.json``."""
    dump_s: float
    """Seconds to check and serialize it."""
    load_s: float
    """Seconds to parse and check it."""


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: Shape
    split_dim: int | None


def _layer(index: int) -> list[_Parameter]:
    qkv = HIDDEN + 2 * NUM_GROUPS * HEAD
    prefix = f"model.layers.{index}"
    return [
        _Parameter(f"{prefix}.attention_norm.weight", (HIDDEN,), None),
        _Parameter(f"{prefix}.attention.qkv.weight", (qkv, HIDDEN), 0),
        _Parameter(f"{prefix}.attention.out.weight", (HIDDEN, HIDDEN), 1),
        _Parameter(f"{prefix}.mlp_norm.weight", (HIDDEN,), None),
        _Parameter(f"{prefix}.mlp.fc1.weight", (2 * FFN, HIDDEN), 0),
        _Parameter(f"{prefix}.mlp.fc2.weight", (HIDDEN, FFN), 1),
    ]


def _stages() -> Iterator[list[_Parameter]]:
    """Yield the parameters of every pipeline rank."""
    bounds = [round(stage * NUM_LAYERS / PIPELINE) for stage in range(PIPELINE + 1)]
    for stage in range(PIPELINE):
        parameters = [p for index in range(bounds[stage], bounds[stage + 1]) for p in _layer(index)]
        if stage == 0:
            parameters.insert(0, _Parameter("model.embedding.weight", (VOCABULARY, HIDDEN), 0))
        if stage == PIPELINE - 1:
            parameters += [
                _Parameter("model.norm.weight", (HIDDEN,), None),
                _Parameter("model.head.weight", (VOCABULARY, HIDDEN), 0),
            ]
        yield parameters


class _Writer:
    """Collector of the boxes of all ranks; checksums are random numbers, which are as long as real
    ones.
    """

    def __init__(self, data: int) -> None:
        self.data = data
        self.entries: dict[str, tuple[Shape, torch.dtype]] = {}
        self.shards: dict[str, list[StoredShard]] = {}
        self.files: dict[str, int] = {}
        self._checksums = tuple(np.random.default_rng(0).integers(0, 1 << 32, 1 << 16).tolist())

    def add(
        self, name: str, shape: Shape, dtype: torch.dtype, rank: int, offset: Shape, box: Shape
    ) -> None:
        file, size = f"tensors.0123456789ab.{rank:05d}.000.safetensors", prod(box) * dtype.itemsize
        start = self.files.get(file, 4096)
        self.files[file] = start + size
        checksums = self._checksums[: -(-size // BLOCK_BYTES)]
        self.entries[name] = (shape, dtype)
        self.shards.setdefault(name, []).append(
            StoredShard(file, start, Box(offset, box), checksums)
        )

    def manifest(self) -> Manifest:
        tensors = {
            name: TensorInfo(*entry, tuple(self.shards[name]))
            for name, entry in self.entries.items()
        }
        files = {**self.files, "state.0123456789ab.pt": 1}
        return Manifest(
            tensors=tensors, files=files, state_file="state.0123456789ab.pt", state_checksum=0
        )


def _collect(num_ranks: int) -> _Writer:
    """Split every parameter and its optimizer states as zero1 does: flat ranges of a rank's
    parameters, one after another.
    """
    writer = _Writer(num_ranks // (TENSOR * PIPELINE))
    for stage, parameters in enumerate(_stages()):
        for tensor in range(TENSOR):
            specs = [
                ShardSpec.replicated(p.shape)
                if p.split_dim is None
                else ShardSpec.split(p.shape, dim=p.split_dim, size=TENSOR, rank=tensor)
                for p in parameters
            ]
            held = [
                (p, s)
                for p, s in zip(parameters, specs, strict=True)
                if tensor == 0 or p.split_dim is not None
            ]
            _divide(writer, stage, tensor, held)
    return writer


def _divide(
    writer: _Writer, stage: int, tensor: int, held: list[tuple[_Parameter, ShardSpec]]
) -> None:
    ends = list(accumulate(prod(spec.local_shape) for _, spec in held))
    share = -(-ends[-1] // writer.data)
    for (parameter, spec), end in zip(held, ends, strict=True):
        first = end - prod(spec.local_shape)
        for data in range(first // share, -(-end // share)):
            low, high = max(first, data * share), min(end, (data + 1) * share)
            rank = tensor + TENSOR * (data + writer.data * stage)
            flat = torch.empty(high - low, device="meta")
            for offset, view in spec.flat_shards(flat, low - first):
                box = tuple(view.shape)
                writer.add(
                    f"state_dict.{parameter.name}",
                    parameter.shape,
                    torch.bfloat16,
                    rank,
                    offset,
                    box,
                )
                for key in OPTIMIZER_KEYS:
                    name = f"optimizer_states.0.state.{parameter.name}.{key}"
                    writer.add(name, parameter.shape, torch.float32, rank, offset, box)


def measure_manifest(num_ranks: int) -> ManifestCost:
    """Build, serialize and read the manifest of a 405B model on ``num_ranks`` ranks (a multiple of
    128).
    """
    writer = _collect(num_ranks)
    start = time.perf_counter()
    text = writer.manifest().dumps()
    dump_s = time.perf_counter() - start
    start = time.perf_counter()
    manifest = Manifest.loads(text.encode())
    load_s = time.perf_counter() - start
    num_shards = sum(len(entry.shards) for entry in manifest.tensors.values())
    num_parameters = sum(
        prod(e.shape) for name, e in manifest.tensors.items() if name.startswith("state_dict.")
    )
    return ManifestCost(num_ranks, num_parameters, num_shards, len(text.encode()), dump_s, load_s)
