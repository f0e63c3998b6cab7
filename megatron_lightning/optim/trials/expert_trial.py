"""Try whether an optimizer steps each matrix of a stack, of experts, alone.

    full       [E, out, in]            a copy of the optimizer
    apart      [1, out, in] x E        a copy of the optimizer each, with the same gradients

If values and states agree, experts can have owners of their own. A state agrees if the states of
the experts are rows of the stack's, or equal to it (step counters). A preconditioner of the dim of
experts, or a norm of the whole stack, does not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from megatron_lightning.optim.trials.probe import (
    LARGEST_SIZE,
    STEPS_LARGE,
    STEPS_SMALL,
    TOLERANCE,
    bounded,
)
from megatron_lightning.optim.trials.trial_steps import (
    DrawnGradients,
    Result,
    as_drawn,
    difference,
    orthogonal_to_rows,
    random_tensor,
    recorded,
    stepped,
    unchanged,
)
from megatron_lightning.parallel.random.replica_rng import ReplicaRng

_EXPERTS = 3
"""Experts of a trial."""


def steps_experts(
    optimizer: Optimizer,
    group: dict[str, Any],
    shapes: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Return whether ``optimizer`` steps every expert of a stack alone. The optimizer and the
    random states stay unchanged.

    Args:
        optimizer: The optimizer, to be copied.
        group: A parameter group of the optimizer.
        shapes: Global shapes [E, out, in] of stacks in the group.
        device: Device of the stepped tensors.
        dtype: Dtype of the stepped tensors.
    """
    generator = torch.Generator().manual_seed(0)
    for (shape, num_steps), direction in product(_trials(shapes), (as_drawn, orthogonal_to_rows)):
        start, base = ([random_tensor(shape, generator).to(device, dtype)] for _ in range(2))
        gradients = DrawnGradients(base, direction, num_steps)
        rng = ReplicaRng(device)
        with unchanged(rng):
            full = stepped(optimizer, group, start, gradients, num_steps)
        apart = []
        for expert in range(_EXPERTS):
            steps = [
                [gradient[expert : expert + 1] for gradient in step] for step in gradients.steps
            ]
            own = [start[0][expert : expert + 1]]
            with unchanged(rng):
                apart.append(stepped(optimizer, group, own, partial(recorded, steps), num_steps))
        if not _agree(full, apart, start[0]):
            return False
    return True


def _trials(shapes: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield shapes and numbers of steps: a small stack, and one of the largest matrices."""
    _, *matrix = max(shapes, key=lambda shape: prod(shape[1:]))
    small, large = bounded(matrix, 1), bounded(matrix, LARGEST_SIZE)
    yield (_EXPERTS, *small), STEPS_SMALL
    if large != small:
        yield (_EXPERTS, *large), STEPS_LARGE


def _agree(full: Result, apart: Sequence[Result], start: Tensor) -> bool:
    values = torch.cat([each.values[0] for each in apart])
    if difference(values, full.values[0], start) > TOLERANCE:
        return False
    of_stack, frame = tree_flatten(full.states[0])
    of_experts = [tree_flatten(each.states[0]) for each in apart]
    if any(other != frame for _, other in of_experts):
        return False
    columns = zip(*(leaves for leaves, _ in of_experts), strict=True)
    return all(_is_stacked(own, parts) for own, parts in zip(of_stack, columns, strict=True))


def _is_stacked(state: Any, parts: Sequence[Any]) -> bool:
    """Return whether a state of the stack consists of the experts' states, or equals each."""
    if not isinstance(state, Tensor):
        return all(bool(part == state) for part in parts)
    if state.dim():
        parts = [torch.cat(list(parts))] if parts[0].dim() else []
    return bool(parts) and all(_is_close(part, state) for part in parts)


def _is_close(state: Tensor, expected: Tensor) -> bool:
    if state.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(state, expected)
    return difference(state, expected, torch.zeros_like(expected)) <= TOLERANCE
