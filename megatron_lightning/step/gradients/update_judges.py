"""Callbacks that judge every update of the weights by loss and gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


@runtime_checkable
class UpdateJudge(Protocol):
    """Callback that judges updates."""

    judges_updates: bool
    """Whether the callback judges updates in this run."""

    def allows_update(self, trainer: pl.Trainer, loss: float, gradient_norm: float) -> bool:
        """Return whether the optimizer may step. Equal on every rank, like the arguments.

        Args:
            trainer: The Trainer.
            loss: Mean over micro-batches, accumulated batches and ranks.
            gradient_norm: Norm before clipping, without a loss scale.
        """
        ...


def update_judges(trainer: pl.Trainer) -> list[UpdateJudge]:
    """Return the callbacks that judge updates."""
    callbacks: list[object] = getattr(trainer, "callbacks", [])
    return [c for c in callbacks if isinstance(c, UpdateJudge) and c.judges_updates]


class UpdateJudges(StepParticipant):
    """Ask callbacks whether the optimizer may step. A collective and a wait for the device in every
    optimizer step.

    Args:
        scope: The run context.
        gradient_norm: Returns the norm before clipping, without a loss scale. A collective.
        judges: The callbacks.
    """

    vetoes = True

    def __init__(
        self,
        scope: RunContext,
        judges: Sequence[UpdateJudge],
        gradient_norm: Callable[[], Tensor],
    ) -> None:
        self._scope = scope
        self._gradient_norm = gradient_norm
        self._judges = judges
        self._sums = self._zero()  # of weighted losses, and of weights, since the last update

    def _zero(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._scope.context.device)

    def begin_batch(self, batch: StepBatch) -> None:
        """Drop the sums of a batch without an update, such as the last batch of an epoch."""
        accumulated = self._scope.module.trainer.accumulate_grad_batches
        if batch.trains and (batch.number - 1) % accumulated == 0:
            self._sums = self._zero()

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Add the loss of a micro-batch on the last stage."""
        if loss is None:
            return
        weight = torch.as_tensor(run.item_weights[microbatch]).to(self._sums)
        value = torch.where(weight == 0, 0.0, loss.detach().to(self._sums))
        self._sums += torch.stack([value * weight, weight])

    def before_update(self) -> bool:
        """Return whether all judges allow the update."""
        group = self._scope.context.axis("world").process_group
        if group is not None:
            dist.all_reduce(self._sums, group=group)
        norm = self._gradient_norm().double()
        loss, gradient_norm = torch.stack([self._sums[0] / self._sums[1], norm]).tolist()
        self._sums = self._zero()
        trainer = self._scope.module.trainer
        verdicts = [judge.allows_update(trainer, loss, gradient_norm) for judge in self._judges]
        return all(verdicts)
