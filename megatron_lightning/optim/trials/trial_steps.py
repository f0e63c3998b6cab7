"""Steps of copies of an optimizer on tensors of a trial. The optimizer, its parameters and the
random states stay unchanged.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_lightning.parallel.random.replica_rng import ReplicaRng

Gradients = Callable[[int, Sequence[Tensor]], list[Tensor]]
"""Returns the gradients of a step, given the step's number and the values before the step."""

_STEP_SCALES = (1.0, 0.1, 3.0)
"""Factors of the gradients."""
_RATE = 1.0
"""Learning rate. A warm-up may start at zero, and then every optimizer looks element-wise.
D-Adaptation grows by a factor of the learning rate."""


class ProbeError(Exception):
    """The optimizer refuses to step tensors other than the model's."""


class Result(NamedTuple):
    """Tensors after the steps of a trial."""

    values: list[Tensor]
    states: list[dict[str, Any]]
    """The optimizer's state of each tensor."""


class DrawnGradients:
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
        """Return the gradients of a step."""
        scale = _STEP_SCALES[step % len(_STEP_SCALES)]
        generator = torch.Generator().manual_seed(step)
        drawn = []
        for base, value in zip(self._base, values, strict=True):
            noise = torch.randn(base.shape, generator=generator, device="cpu").to(base)
            drawn.append(self._direction(scale * (base + 0.5 * noise), value))
        self.steps.append(drawn)
        return drawn


def recorded(steps: Sequence[list[Tensor]], step: int, _: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a recorded step."""
    return steps[step]


def as_drawn(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the gradient itself."""
    return gradient


def orthogonal_to_rows(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the norm-preserving part of a gradient, orthogonal to rows, as for layers before a
    normalization. AdamP projects such gradients.
    """
    dim = 0 if value.ndim < 2 else 1
    g, w = gradient.flatten(dim), value.flatten(dim)
    along = (g * w).sum(dim, keepdim=True) / (w * w).sum(dim, keepdim=True).clamp(min=1e-12)
    return (g - along * w).view_as(gradient)


def random_tensor(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers of several magnitudes, smaller along the dims, to make halves differ."""
    tensor = torch.randn(*shape, generator=generator, device="cpu")
    for dim, length in enumerate(shape):
        tensor *= torch.linspace(1.5, 0.5, length, device="cpu").view(
            -1, *(1,) * (len(shape) - dim - 1)
        )
    return tensor


def difference(value: Tensor, expected: Tensor, before: Tensor) -> float:
    """Return the largest difference relative to the largest update. Infinite for NaN."""
    found, update = (float((expected - compared).abs().max()) for compared in (value, before))
    return (0.0 if found == 0.0 else found / max(update, 1e-30)) if found < inf else inf


@contextmanager
def unchanged(rng: ReplicaRng) -> Iterator[None]:
    """Restore the random states. Functions compiled by an optimizer for each shape run eagerly."""
    states = rng.everything()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        rng.restore(states)


def stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[Tensor],
    gradients: Gradients,
    num_steps: int,
) -> Result:
    """Step copies of ``values`` with a copy of ``optimizer``."""
    parameters = [nn.Parameter(value.detach().clone()) for value in values]
    clone = _copy_of(optimizer, group, parameters)
    for number in range(num_steps):
        closure = _Closure(parameters, gradients(number, [each.detach() for each in parameters]))
        closure()
        type(optimizer).step(clone, closure)
        if closure.num_calls > 2:
            raise ProbeError("it evaluates the loss several times in a step, at other weights")
    values_after = [parameter.detach() for parameter in parameters]
    return Result(values_after, [dict(clone.state.get(p, {})) for p in parameters])


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
