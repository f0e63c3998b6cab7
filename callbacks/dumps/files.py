"""Files of dumps: full tensors, with the order in which a step makes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from megatron_lightning.optional import require


def save_dump(path: Path, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Write a dump, in place of an earlier one.

    Args:
        path: The file.
        tensors: Entry -> full tensor on the CPU.
        names: Parameters of the full model, in order.
    """
    safetensors = require("safetensors.torch", "DumpTensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = _order(tensors, names)
    temporary = path.with_suffix(".tmp")
    safetensors.save_file(dict(tensors), temporary, metadata={"order": json.dumps(ordered)})
    temporary.replace(path)


def _order(entries: Iterable[str], names: Iterable[str]) -> list[str]:
    """Sort entries: weights, what modules receive and return in the order of the forward, and
    gradients in the order of the backward. A module comes behind the modules inside of it.
    """
    last: dict[str, int] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        last |= {".".join(parts[: depth + 1]): index for depth in range(len(parts))}

    def place(entry: str) -> tuple[int, int, int, int]:
        kind, _, name = entry.partition("/")
        known = name
        while known and known not in last:  # a further tensor, or a module without parameters
            known = known.rpartition(".")[0]
        index, kinds = last.get(known, -1), ("weights", "inputs", "outputs", "gradients")
        passes = {"weights": 0, "gradients": 2}.get(kind, 1)
        in_pass = -index if kind == "gradients" else index
        return passes, in_pass, -name.count("."), kinds.index(kind)

    return sorted(entries, key=place)
