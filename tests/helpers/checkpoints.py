"""Small checkpoints of one process: saved, loaded, compared, and rewritten as an attacker would."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint import TensorShards, load_sharded, open_checkpoint, save_sharded


def some_tensors() -> dict[str, Tensor]:
    """Return a matrix, a bfloat16 cube, a number and nothing, by name."""
    torch.manual_seed(0)
    return {
        "state_dict.weight": torch.randn(8, 6),
        "state_dict.half": torch.randn(5, 3, 2).bfloat16(),
        "state_dict.count": torch.tensor(7),
        "state_dict.empty": torch.zeros(0, 4),
    }


def save_tensors(
    path: Path,
    tensors: dict[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Save whole tensors, :func:`some_tensors` if none are given."""
    tensors = some_tensors() if tensors is None else tensors
    save_sharded(
        path,
        [TensorShards.full(name, t) for name, t in tensors.items()],
        state or {"epoch": 1},
        **options,
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load everything that a checkpoint holds."""
    source = open_checkpoint(path)
    tensors = {
        name: torch.full(info.shape, 99, dtype=info.dtype)
        for name, info in source.tensors().items()
    }
    load_sharded(source, [TensorShards.full(name, t) for name, t in tensors.items()])
    return tensors


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, shapes, dtypes and values."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest as an attacker would: with a right checksum."""
    body = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    change(body)
    body["checksum"] = zlib.crc32(json.dumps(body, separators=(",", ":")).encode())
    (path / "manifest.json").write_text(json.dumps(body, separators=(",", ":")))
