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

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.parallel.random.replica_rng import ReplicaRng

Halves = tuple[list[Tensor], list[Tensor]]
Gradients = Callable[[int, Sequence[Tensor]], list[Tensor]]
"""Returns the gradients of a step, given the step's number and the values before the step."""

_STEPS_SMALL, _STEPS_LARGE = 32, 8
"""Steps with small tensors, enough for estimated step sizes to grow, and steps with a group's
largest tensor."""
_SMALLEST, _LARGEST = 128, 4096
"""Entries of a dim. Optimizers treat small matrices in another way: Adafactor of big_vision factors
from 32 on, optax's from 128 on."""
_LARGEST_SIZE = 2**20
"""Elements of a tensor, to bound the time of a trial to seconds."""
_STEP_SCALES = (1.0, 0.1, 3.0)
"""Factors of the gradients."""
_RATE = 1.0
"""Learning rate. A warm-up may start at zero, and then every optimizer looks element-wise.
D-Adaptation grows by a factor of the learning rate."""
_TOLERANCE = 1e-4
"""Tolerance relative to the largest update. Halves compute the same operations in fp32. Only vector
lanes differ."""


class ProbeError(Exception):
    """The optimizer refuses to step tensors other than the model's."""


class Spread(NamedTuple):
    """Result of a division."""

    division: str
    difference: float
    """Largest difference of an update, relative to the largest update."""

    @property
    def is_equal(self) -> bool:
        """Whether the halves give the values of the full tensors."""
        return self.difference <= _TOLERANCE


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
            [_random(shape, generator).to(device, dtype) for shape in tried] for _ in range(2)
        )
        for direction in (_as_drawn, _orthogonal_to_rows):
            gradients = _Gradients(base, direction, num_steps)
            yield from _tried(optimizer, group, divisions, start, gradients)


def trials(shapes: Sequence[Sequence[int]]) -> list[tuple[list[tuple[int, ...]], int]]:
    """Return the shapes of the tensors of every trial of a group, and the number of steps.

    Args:
        shapes: Global shapes of the group's parameters.
    """
    small, large = trial_shapes(shapes, 1), trial_shapes(shapes, _LARGEST_SIZE)
    return [(small, _STEPS_SMALL), *([(large, _STEPS_LARGE)] if large != small else [])]


def _tried(
    optimizer: Optimizer,
    group: dict[str, Any],
    divisions: Sequence[str],
    start: Sequence[Tensor],
    gradients: _Gradients,
) -> Iterator[Spread]:
    """Yield the results of a trial from ``start``."""
    rng = ReplicaRng(start[0].device)
    # Optimizers may draw (stochastic rounding): both trials draw the same numbers.
    with _unchanged(rng):
        stepped = _stepped(optimizer, group, start, gradients, gradients.num_steps)
    if all(
        torch.equal(stepped_half, start_half)
        for stepped_half, start_half in zip(stepped, start, strict=True)
    ):
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
            start_half, stepped_half = divide(start)[half], divide(stepped)[half]
            steps = [divide(step)[half] for step in gradients.steps]
            with _unchanged(rng):
                values = _stepped(
                    optimizer, group, start_half, partial(_recorded, steps), gradients.num_steps
                )
            differences += map(_difference, values, stepped_half, start_half)
        yield Spread(name, max(differences))


class _Gradients:
    """Draw and record the gradients of the full tensors.

    Gradients of several steps agree in part, to let estimated step sizes grow. The scale of
    gradients varies, to reveal clipping inside of an optimizer.
    """

    def __init__(
        self,
        base: Sequence[Tensor],
        direction: Callable[[Tensor, Tensor], Tensor],
        num_steps: int,
    ) -> None:
        self._base = base
        self._direction = direction
        self.num_steps = num_steps
        self.steps: list[list[Tensor]] = []

    def __call__(self, step: int, values: Sequence[Tensor]) -> list[Tensor]:
        scale = _STEP_SCALES[step % len(_STEP_SCALES)]
        generator = torch.Generator().manual_seed(step)
        drawn = []
        for base, value in zip(self._base, values, strict=True):
            noise = torch.randn(base.shape, generator=generator, device="cpu").to(base)
            drawn.append(self._direction(scale * (base + 0.5 * noise), value))
        self.steps.append(drawn)
        return drawn


def _recorded(steps: Sequence[list[Tensor]], step: int, _: Sequence[Tensor]) -> list[Tensor]:
    return steps[step]


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
    return [_bounded(largest, largest_size), _bounded(largest, 1), *vectors]


def _bounded(shape: Sequence[int], largest_size: int) -> tuple[int, ...]:
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


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers of several magnitudes, smaller along the dims, to make halves differ."""
    tensor = torch.randn(*shape, generator=generator, device="cpu")
    for dim, length in enumerate(shape):
        tensor *= torch.linspace(1.5, 0.5, length, device="cpu").view(
            -1, *(1,) * (len(shape) - dim - 1)
        )
    return tensor


def _difference(value: Tensor, expected: Tensor, before: Tensor) -> float:
    """Return the largest difference relative to the largest update. Infinite for NaN."""
    difference, update = (float((expected - compared).abs().max()) for compared in (value, before))
    return (
        (0.0 if difference == 0.0 else difference / max(update, 1e-30)) if difference < inf else inf
    )


def _as_drawn(gradient: Tensor, value: Tensor) -> Tensor:
    return gradient


def _orthogonal_to_rows(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the norm-preserving part of a gradient, orthogonal to rows, as for layers before a
    normalization. AdamP projects such gradients.
    """
    dim = 0 if value.ndim < 2 else 1
    g, w = gradient.flatten(dim), value.flatten(dim)
    along = (g * w).sum(dim, keepdim=True) / (w * w).sum(dim, keepdim=True).clamp(min=1e-12)
    return (g - along * w).view_as(gradient)


@contextmanager
def _unchanged(rng: ReplicaRng) -> Iterator[None]:
    """Restore the random states. Functions compiled by an optimizer for each shape run eagerly."""
    states = rng.everything()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        rng.restore(states)


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


# -------------------------------------------------------------------------------------------- steps


def _stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[Tensor],
    gradients: Gradients,
    num_steps: int,
) -> list[Tensor]:
    """Step copies of ``values`` with a copy of ``optimizer``. Return the results."""
    parameters = [nn.Parameter(value.detach().clone()) for value in values]
    clone = _copy_of(optimizer, group, parameters)
    for number in range(num_steps):
        closure = _Closure(parameters, gradients(number, [each.detach() for each in parameters]))
        closure()
        type(optimizer).step(clone, closure)
        if closure.num_calls > 2:
            raise ProbeError("it evaluates the loss several times in a step, at other weights")
    return [parameter.detach() for parameter in parameters]


class _Closure:
    """Set the gradients, like the closure of a training loop."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        self._pairs = list(zip(parameters, gradients, strict=True))
        self.num_calls = 0

    def __call__(self) -> Any:
        self.num_calls += 1
        for parameter, gradient in self._pairs:
            parameter.grad = gradient.clone()
        return torch.ones((), device=self._pairs[0][0].device)


def _nothing(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _copy_of(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    """Return a copy of ``optimizer`` for ``parameters``, with the hyper-parameters of ``group``."""
    # Modules and parameters of the optimizer are large, and the copy must not change either.
    memo: dict[int, Any] = {
        id(value): value for value in vars(optimizer).values() if isinstance(value, nn.Module)
    }
    for each in optimizer.param_groups:
        memo |= {id(p): nn.Parameter(_nothing(p)) for p in each["params"]}
    options = {key: value for key, value in group.items() if key != "params"}
    clone = object.__new__(type(optimizer))
    attributes = vars(clone)  # param_groups and state may be properties of the class
    plain_values = {
        k: copy.deepcopy(v, memo) for k, v in optimizer.state.items() if isinstance(k, str)
    }
    attributes["state"] = defaultdict(dict, plain_values)
    attributes["param_groups"] = [{"params": parameters, **copy.deepcopy(options, memo)}]
    # An inner optimizer with shared groups or state shares the groups and state of the copy.
    memo |= {
        id(group): attributes["param_groups"][0],
        id(optimizer.param_groups): attributes["param_groups"],
        id(optimizer.state): attributes["state"],
    }
    # "step" is there when a scheduler has wrapped the original's.
    left_out = ("state", "param_groups", "step")
    for key, value in vars(optimizer).items():
        if key not in left_out:
            # Hooks belong to the original optimizer. Everything else is copied: the trial leaves no
            # trace in the original.
            attributes[key] = (
                type(value)() if key.endswith("_hooks") else copy.deepcopy(value, memo)
            )
    rate = attributes["param_groups"][0].get("lr")
    if rate is not None:
        attributes["param_groups"][0]["lr"] = (
            torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
        )
    train = getattr(clone, "train", None)
    if callable(train):  # schedule-free optimizers step only in training mode
        train()
    return clone
