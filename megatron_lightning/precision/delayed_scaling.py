"""Delayed scaling: scales from the amax values of earlier micro-batches
(https://arxiv.org/abs/2209.05433, section 3.2).

During a pipeline run every micro-batch is quantized with the same scale, so that a recomputed
forward equals the first forward. The amax of each micro-batch is noted. At the end of the run the
noted values are reduced over the ranks with the same layers, in one message, and appended to the
histories, one entry a micro-batch. Then the next scales are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.compat import is_in_backward, never_drop
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.precision.recipes import FP8Recipe, Role
from megatron_lightning.precision.scaling import factors

ROLES: tuple[Role, ...] = ("input", "weight", "output_grad")


class AmaxHistory:
    """Amax values of one tensor of a layer.

    Args:
        recipe: Length of the history, algorithm and margin.
        role: Role of the tensor.
    """

    def __init__(self, recipe: FP8Recipe, role: Role) -> None:
        self._recipe = recipe
        self._role = role
        self._format = recipe.data_format(role)
        self.entries = torch.zeros(0)
        """The latest first, in fp32. 0 for a non-finite amax."""
        self.factor = torch.ones(())
        """Factor of the values. 1 before the first entry."""
        self._noted: list[Tensor] = []
        self._register()

    def _register(self) -> None:
        self._number = torch.tensor(id(self), device="cpu")
        _HISTORIES[id(self)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()  # a copy gets a new number

    def note(self, amax: Tensor) -> None:
        """Note the amax of a micro-batch, unless a forward is recomputed."""
        if torch.compiler.is_compiling():
            torch.ops.megatron_lightning.note_amax(amax, self._number)
        else:
            self.note_now(amax)

    def note_now(self, amax: Tensor) -> None:
        """Do as :meth:`note`, outside of compiled graphs."""
        # A forward inside of backward is a recomputation.
        if self._role == "output_grad" or not is_in_backward():
            self._noted.append(amax.detach().where(amax.isfinite(), 0.0).reshape(()))

    def take_noted(self) -> list[Tensor]:
        """Return and clear the values noted since the last call."""
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
        # With an amax of 0 (zeros only), the last scale stays.
        previous = self.factor.to(factor.device)
        self.factor = (factor / 2.0**recipe.margin).where(amax > 0.0, previous)


# A traced list would be compiled again for each list length. Operators take tensors and numbers, so
# a number represents a history.
_HISTORIES: weakref.WeakValueDictionary[int, AmaxHistory] = weakref.WeakValueDictionary()


@torch.library.custom_op(
    "megatron_lightning::note_amax", mutates_args=(), schema="(Tensor amax, Tensor number) -> ()"
)
def _note_amax(amax: Tensor, number: Tensor) -> None:
    """Note a copy: the compiler may reuse the memory as soon as this returns."""
    _HISTORIES[int(number)].note_now(amax.clone())


@_note_amax.register_fake
def _(amax: Tensor, number: Tensor) -> None:
    return None


never_drop(torch.ops.megatron_lightning.note_amax.default)


def make_histories(recipe: FP8Recipe) -> Mapping[Role, AmaxHistory]:
    """Return the histories of a layer's three tensors. Empty without delayed scaling."""
    if recipe.scaling != "delayed":
        return {}
    return {role: AmaxHistory(recipe, role) for role in ROLES}


def advance(histories: Sequence[AmaxHistory], group: AxisGroup | None) -> None:
    """Append noted values to the histories, reduced over ``group``.

    All ranks of the group call the function with the same layers, at the end of a pipeline run.
    """
    noted = [history.take_noted() for history in histories]
    values = [value for values_of_call in noted for value in values_of_call]
    if not values:
        return
    together = torch.stack(values)
    if group is not None:
        together = all_reduce(together, group, "max")
    parts = torch.split(together, [len(values_of_call) for values_of_call in noted])
    for history, part in zip(histories, parts, strict=True):
        history.append(part)
