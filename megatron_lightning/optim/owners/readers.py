"""Optimizers known to read full tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Muon, Optimizer

from megatron_lightning.optim.owners.units import Units
from megatron_lightning.optim.stepping.chained import members

READERS: Mapping[str, bool] = {
    "AdamP": False,
    "SGDP": False,
    "ScalableShampoo": False,
    "DistributedShampoo": False,
    "SWATS": True,
}
"""Class of optimizers missed by a trial -> whether the class reads a full group as well. A trial
may miss optimizers that read full tensors only in rare steps (with gradients nearly orthogonal to a
tensor, or every thousandth step). Names, since the packages need not be installed."""

_MATRIX_OPTIMIZERS = (Muon,)


def reads(optimizer: Optimizer) -> bool | None:
    """Return whether the class is known to read a full group (True), or full tensors (False). None:
    neither is known.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return next((READERS[name] for name in names if name in READERS), None)


def steps_matrices(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` treats every parameter as a matrix."""
    return isinstance(optimizer, _MATRIX_OPTIMIZERS)


def matrix_units(optimizer: Optimizer) -> dict[int, Units]:
    """Return the ids of the parameter groups stepped as matrices, with the units."""
    return {
        id(group): Units.MATRICES
        for member in members(optimizer)
        if steps_matrices(member)
        for group in member.param_groups
    }
