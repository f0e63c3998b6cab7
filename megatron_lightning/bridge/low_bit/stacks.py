"""Stacked experts of a folder as matrices of their own, as servers load weights in few bits.

    X.experts.gate_up_proj [E, 2f, h]   X.experts.0.gate_proj.weight [f, h], ...0.up_proj...
    X.experts.down_proj    [E, h, f]    X.experts.0.down_proj.weight [h, f], ...

``config.json`` of such a folder lists the stacks, for the way back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megatron_lightning.bridge.tensors.lazy import Lazy

STACKED_EXPERTS = "stacked_experts"
"""Entry of config.json: names of the stacks in the folder of the model."""
_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}


def separable(tensors: Mapping[str, Lazy], modules: Collection[str]) -> list[str]:
    """Return the names of the stacks of some modules, whose experts have no biases.

    Args:
        tensors: The folder's tensors.
        modules: Paths of modules that hold [E, out, in], from the block on.
    """
    return [
        name
        for name, x in tensors.items()
        if x.ndim == 3 and name.rpartition(".")[0].endswith(tuple(modules) or ("\0",))
        if not any(other.startswith(f"{name}_") for other in tensors)
    ]


def parts_of(name: str, count: int) -> list[tuple[str, ...]]:
    """Return the names of each expert's matrices."""
    path, _, own = name.rpartition(".")
    parts = _FUSED.get(own, (own,))
    return [tuple(f"{path}.{e}.{part}.weight" for part in parts) for e in range(count)]


def separated(tensors: Mapping[str, Lazy], names: Iterable[str]) -> dict[str, Lazy]:
    """Return the tensors with every expert's matrices in the place of stacks."""
    result = dict(tensors)
    for name in names:
        stack = result.pop(name)
        for matrix, parts in zip(stack.unbind(), parts_of(name, len(stack)), strict=True):
            result |= dict(zip(parts, matrix.chunk(len(parts)), strict=True))  # type: ignore[arg-type]
    return result


def stacked(tensors: Mapping[str, Lazy], names: Iterable[str]) -> dict[str, Lazy]:
    """Undo :func:`separated`."""
    result = dict(tensors)
    for name in names:
        experts: list[Tensor] = []
        while parts_of(name, len(experts) + 1)[-1][0] in result:
            parts = parts_of(name, len(experts) + 1)[-1]
            experts.append(torch.cat([result.pop(part) for part in parts]))
        if experts:
            result[name] = torch.stack(experts)  # type: ignore[assignment]
    return result
