"""Delayed scaling: scales from the largest values of earlier micro-batches
(https://arxiv.org/abs/2209.05433, section 3.2).

During a pipeline run every micro-batch is quantized with the same scale, so that a recomputed
forward is equal to the first one; its largest value is noted. At the end of the run they are
reduced over the ranks that share the layers, in one message, and enter the histories, one a
micro-batch; the next scales are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.precision.recipes import FP8Recipe, Role
from megatron_lightning.precision.scaling import factors

ROLES: tuple[Role, ...] = ("input", "weight", "output_grad")


class AmaxHistory:
    """Largest values of one tensor of a layer.

    Args:
        recipe: Length of the history, algorithm and margin.
        role: Role of the tensor.
    """

    def __init__(self, recipe: FP8Recipe, role: Role) -> None:
        self._recipe = recipe
        self._format = recipe.code_format(role)
        self.entries = torch.zeros(0)
        """The latest first, in fp32; 0 where a value was not finite."""
        self.factor = torch.ones(())
        """Factor of the values; 1 until there is a history."""
        self._noted: list[Tensor] = []

    def note(self, amax: Tensor) -> None:
        """Note the largest value of a micro-batch."""
        self._noted.append(amax.detach().where(amax.isfinite(), 0.0).reshape(()))

    def take_noted(self) -> list[Tensor]:
        """Return what was noted since the last call, and forget it."""
        noted, self._noted = self._noted, []
        return noted

    def append(self, noted: Tensor) -> None:
        """Append the values of micro-batches [m], and compute the next scale."""
        if len(noted):
            self.load(torch.cat((noted.flip(0), self.entries.to(noted.device))))

    def load(self, entries: Tensor) -> None:
        """Set the history, and compute the next scale."""
        recipe = self._recipe
        self.entries = entries[: recipe.amax_history_len].clone()
        if not len(self.entries):
            return
        latest = recipe.amax_compute_algo == "most_recent"
        amax = self.entries[0] if latest else self.entries.amax()
        factor = factors(amax, self._format, power_of_two=recipe.rounds_scales)
        # Without a largest value, as of zeros, the last scale stays.
        previous = self.factor.to(factor.device)
        self.factor = (factor / 2.0**recipe.margin).where(amax > 0.0, previous)


def make_histories(recipe: FP8Recipe) -> Mapping[Role, AmaxHistory]:
    """Return the histories of a layer's three tensors; none without delayed scaling."""
    if recipe.scaling != "delayed":
        return {}
    return {role: AmaxHistory(recipe, role) for role in ROLES}


def advance(histories: Sequence[AmaxHistory], group: AxisGroup | None) -> None:
    """Append what was noted to the histories, reduced over ``group``; all of its ranks call this
    with the same layers, at the end of a pipeline run.
    """
    noted = [history.take_noted() for history in histories]
    values = [value for own in noted for value in own]
    if not values:
        return
    together = torch.stack(values)
    if group is not None:
        together = all_reduce(together, group, "max")
    parts = torch.split(together, [len(own) for own in noted])
    for history, part in zip(histories, parts, strict=True):
        history.append(part)
