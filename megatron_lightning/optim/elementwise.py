"""Check that an optimizer is element-wise, so that it may step flat shards of a matrix.

An optimizer that looks at a parameter as a whole (a matrix factorization, an orthogonalization, a
trust ratio) computes something else on a shard; those that are known to (``matrices``) get full
matrices. The optimizers of torch that are element-wise are listed; any other is tried on a small
matrix.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from megatron_lightning.errors import ConfigError

ELEMENTWISE = frozenset(
    {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop}
)
_PROBE_SHAPE, _PROBE_SPLIT, _PROBE_STEPS = (6, 4), 11, 3


def require_elementwise(optimizer: Optimizer) -> None:
    """Check that ``optimizer`` gives the same result on the flat shards of a matrix as on the full
    matrix.
    """
    if type(optimizer) in ELEMENTWISE:
        return
    name = type(optimizer).__name__
    advice = (
        'Set data_parallel="ddp", which steps full parameters on every rank, or choose an '
        "element-wise optimizer."
    )
    for group in optimizer.param_groups:
        try:
            full, shards = probe(optimizer, group)
        except Exception as error:
            raise ConfigError(
                f"{name} could not be tried on a small matrix, which sharding needs for optimizers "
                f"that it does not know ({type(error).__name__}: {error}). {advice}"
            ) from error
        if not full.any():
            raise ConfigError(
                f"{name} did not move a small matrix in its param_groups, where sharding puts "
                "shards of the parameters: it steps something else, such as the groups of an "
                f"optimizer inside it. {advice}"
            )
        if not torch.allclose(full, shards, rtol=1e-4, atol=1e-4 * float(full.abs().max())):
            raise ConfigError(
                f"{name} does not treat every element by itself: a matrix stepped in full and as "
                "two flat shards differs by "
                f'{float((full - shards).abs().max()):.2g}. "zero1" and "fsdp" shard parameters '
                f"into flat shards. {advice}"
            )


def probe(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Step a matrix in full and as two flat shards with the hyper-parameters of ``group``; return
    both 1-D updates.
    """
    device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + _PROBE_STEPS, *_PROBE_SHAPE, generator=generator).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        full = _steps(optimizer, group, [start], [[gradient] for gradient in gradients])
        shards = _steps(
            optimizer, group, _split(start), [_split(gradient) for gradient in gradients]
        )
    return full - start.flatten(), shards - start.flatten()


def _split(matrix: Tensor) -> list[Tensor]:
    flat = matrix.flatten()
    return [flat[:_PROBE_SPLIT], flat[_PROBE_SPLIT:]]


def _steps(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], gradients: list[list[Tensor]]
) -> Tensor:
    """Step copies of ``values`` once per list of gradients; return the results, flattened and
    joined.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    clone = object.__new__(type(optimizer))
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": parameters}
    ]
    # An optimizer inside that shares groups or state with this one shares those of the clone.
    shared: dict[int, Any] = {id(group): clone.param_groups[0]}
    shared |= {id(optimizer.param_groups): clone.param_groups, id(optimizer.state): clone.state}
    # "step" is there when a scheduler has wrapped the original's.
    left_out = ("state", "param_groups", "step")
    for key, value in vars(optimizer).items():
        if key not in left_out:
            # Hooks belong to the original; everything else is copied, so that the trial leaves no
            # trace in it.
            clone.__dict__[key] = (
                type(value)() if key.endswith("_hooks") else copy.deepcopy(value, shared)
            )
    rate = clone.param_groups[0].get("lr")
    if rate is not None:  # a warm-up may start at zero, where every optimizer looks element-wise
        clone.param_groups[0]["lr"] = (
            torch.full_like(rate, 0.1) if isinstance(rate, Tensor) else 0.1
        )
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(clone)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
