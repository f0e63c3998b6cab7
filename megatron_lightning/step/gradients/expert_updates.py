"""Biases of experts, updated by the tokens of an optimizer step."""

from __future__ import annotations

from functools import partial

from megatron_lightning.layers.moe.balance import ExpertBalance
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext


class ExpertUpdates(StepParticipant):
    """Move the biases of this rank's layers of experts after every update.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        group = scope.context.axis("tp-dp-cp")
        self._balance = ExpertBalance(scope.module, partial(all_reduce, group=group))

    def after_update(self, *, stepped: bool) -> None:
        """Move the biases. A collective if layers have biases."""
        self._balance.end_step(stepped=stepped)
