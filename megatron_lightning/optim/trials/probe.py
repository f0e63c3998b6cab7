"""Try an optimizer on tensors split between two copies of the optimizer, as between ranks.

A copy of the optimizer steps a few tensors in full and records the gradients. Two more copies step
a half each, with the same half of every gradient. A divisible optimizer gives the same values. The
divisions:

    flat       the flattened elements of every tensor            zero1, fsdp
    rows       dim 0 of matrices; vectors are replicated         tensor and expert parallelism
    columns    dim 1 of matrices; vectors are replicated         tensor parallelism
    tensors    the list of tensors of a group                    pipeline parallelism

Each half has a separate optimizer, since a rank knows nothing about the statistics of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.optim.trials.trial_steps import (
    DrawnGradients,
    ProbeError,
    as_drawn,
    difference,
    orthogonal_to_rows,
    random_tensor,
    recorded,
    stepped,
    unchanged,
)
from megatron_lightning.parallel.random.replica_rng import ReplicaRng

Halves = tuple[list[Tensor], list[Tensor]]
STEPS_SMALL, STEPS_LARGE = 32, 8
"""Steps with small tensors, enough for estimated step sizes to grow, and steps with a group's
largest tensor."""
_SMALLEST, _LARGEST = 128, 4096
"""Entries of a dim. Optimizers treat small matrices in another way: Adafactor of big_vision factors
from 32 on, optax's from 128 on."""
LARGEST_SIZE = 2**20
"""Elements of a tensor, to bound the time of a trial to seconds."""
TOLERANCE = 1e-4
"""Tolerance relative to the largest update. Halves compute the same operations in fp32. Only vector
lanes differ."""


class Spread(NamedTuple):
    """Result of a division."""

    division: str
    difference: float
    """Largest difference of an update, relative to the largest update."""

    @property
    def is_equal(self) -> bool:
        """Whether the halves give the values of the full tensors."""
        return self.difference <= TOLERANCE


def probe(
    optimizer: Optimizer,
    group: dict[str, Any],
    divisions: Sequence[str],
    *,
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Spread]:
    """Yield the results of ``divisions`` with the hyper-parameters of ``group``. The optimizer and
    the random states stay unchanged.

    Args:
        optimizer: The optimizer, to be copied.
        group: A parameter group of the optimizer.
        divisions: Keys of :data:`DIVISIONS`.
        shapes: Global shapes of the group's parameters.
        device: Device of the stepped tensors.
        dtype: Dtype of the stepped tensors.

    Raises:
        ProbeError: If the optimizer does not step the tensors, or evaluates the loss several times.
    """
    planned = trials(shapes)
    for tried, num_steps in planned[:1] if list(divisions) == ["tensors"] else planned:
        generator = torch.Generator().manual_seed(0)
        start, base = (
            [random_tensor(shape, generator).to(device, dtype) for shape in tried] for _ in range(2)
        )
        for direction in (as_drawn, orthogonal_to_rows):
            gradients = DrawnGradients(base, direction, num_steps)
            yield from _tried(optimizer, group, divisions, start, gradients)


def trials(shapes: Sequence[Sequence[int]]) -> list[tuple[list[tuple[int, ...]], int]]:
    """Return the shapes of the tensors of every trial of a group, and the number of steps.

    Args:
        shapes: Global shapes of the group's parameters.
    """
    small, large = trial_shapes(shapes, 1), trial_shapes(shapes, LARGEST_SIZE)
    return [(small, STEPS_SMALL), *([(large, STEPS_LARGE)] if large != small else [])]


def _tried(
    optimizer: Optimizer,
    group: dict[str, Any],
    divisions: Sequence[str],
    start: Sequence[Tensor],
    gradients: DrawnGradients,
) -> Iterator[Spread]:
    """Yield the results of a trial from ``start``."""
    rng = ReplicaRng(start[0].device)
    # Optimizers may draw (stochastic rounding): both trials draw the same numbers.
    with unchanged(rng):
        full, _ = stepped(optimizer, group, start, gradients, gradients.num_steps)
    if all(torch.equal(after, before) for after, before in zip(full, start, strict=True)):
        raise ProbeError(
            "it did not move a matrix in its param_groups; it steps something else, such as "
            "the groups of an optimizer inside it"
        )
    for name in divisions:
        divide = DIVISIONS[name]
        differences: list[float] = []
        # Each half is stepped alone, as a rank would, on the gradients that the full tensors had.
        # If the update of a half differs, the optimizer reads more than elements.
        for half in (0, 1):
            start_half, full_half = divide(start)[half], divide(full)[half]
            steps = [divide(step)[half] for step in gradients.steps]
            with unchanged(rng):
                values, _ = stepped(
                    optimizer, group, start_half, partial(recorded, steps), gradients.num_steps
                )
            differences += map(difference, values, full_half, start_half)
        yield Spread(name, max(differences))


def trial_shapes(shapes: Sequence[Sequence[int]], largest_size: int) -> list[tuple[int, ...]]:
    """Return the shapes to represent a group: the bounded largest shape, a smaller shape of as many
    dims, and a vector if the group has vectors.

    Args:
        shapes: Global shapes of the group's parameters.
        largest_size: Largest number of elements, as far as the smallest dims allow.
    """
    largest = max(shapes, key=prod, default=(_SMALLEST, _SMALLEST))
    if len(largest) < 2:
        return [(max(_SMALLEST, min(prod(largest), largest_size)),), (_SMALLEST,)]
    vectors = [(_SMALLEST,)] if any(len(shape) < 2 for shape in shapes) else []
    return [bounded(largest, largest_size), bounded(largest, 1), *vectors]


def bounded(shape: Sequence[int], largest_size: int) -> tuple[int, ...]:
    """Return ``shape`` with the two largest dims in bounds and, as far as bounds allow, at most
    ``largest_size`` elements.
    """
    dims = [min(n, _LARGEST) for n in shape]
    first, second = sorted(range(len(dims)), key=lambda dim: -dims[dim])[:2]
    for dim in (first, second):
        dims[dim] = max(dims[dim], _SMALLEST)
    while prod(dims) > largest_size and max(dims) > _SMALLEST:
        dim = max(range(len(dims)), key=dims.__getitem__)
        dims[dim] = max(_SMALLEST, dims[dim] // 2)
    return tuple(dims)


# ---------------------------------------------------------------------------------------- divisions


def _flat(tensors: Sequence[Tensor]) -> Halves:
    pairs = [_cut(tensor.flatten(), 0) for tensor in tensors]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _along(dim: int, tensors: Sequence[Tensor]) -> Halves:
    only_vectors = all(tensor.ndim < 2 for tensor in tensors)
    are_split = [t.ndim > 1 or (only_vectors and i == 0) for i, t in enumerate(tensors)]
    pairs = [
        _cut(tensor, min(dim, tensor.ndim - 1)) if is_cut else (tensor, tensor)
        for tensor, is_cut in zip(tensors, are_split, strict=True)
    ]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _cut(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cut between the block boundaries of optimizers, for instance of 8-bit blocks with a shared
    scale.
    """
    length = tensor.shape[dim]
    first = max(1, length * 3 // 7 | 1)
    return tensor.narrow(dim, 0, first), tensor.narrow(dim, first, length - first)


def _by_tensors(tensors: Sequence[Tensor]) -> Halves:
    return list(tensors[:1]), list(tensors[1:])


DIVISIONS: Mapping[str, Callable[[Sequence[Tensor]], Halves]] = {
    "flat": _flat,
    "rows": lambda tensors: _along(0, tensors),
    "columns": lambda tensors: _along(1, tensors),
    "tensors": _by_tensors,
}
"""Name -> the tensors of both optimizers."""
