"""Run a training step again before the update, to tell broken hardware from a wrong step.

A right machine gives the same losses and gradients twice, bit by bit. A difference points to the
hardware. The same wrong values again point to the data or the model. Megatron-LM has the same
distinction and exit codes (megatron/core/rerun_state_machine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.resilience.exit_codes import RERUN_DIFFERS, RERUN_EQUAL
from megatron_lightning.step.agreed_stop import AgreedStop
from megatron_lightning.step.repeats.dummy_step import unseen
from megatron_lightning.step.repeats.recorded_step import HELD_BYTES, RecordedStep, versions
from megatron_lightning.step.run_context import RunContext

_LISTED = 3
Repeat = Callable[[Any, tuple[Any, ...]], None]


@dataclass(frozen=True)
class RerunResult:
    """Verdict on a step that was run again. Equal on all ranks."""

    reproducible: bool
    """Whether all losses and gradients had the same bits again on every rank."""
    loss: float
    """Mean loss of the first run, over micro-batches and replicas."""
    loss_again: float
    """Mean loss of the second run."""
    differences: tuple[str, ...] = ()
    """Losses and gradients with other values, by rank."""
    compares_gradients: bool = True
    """Whether gradients were compared. Under a loss scale (fp16) losses alone are."""

    @property
    def exit_code(self) -> int:
        """Exit code of a run that ends because of this step: 16 or 17."""
        return RERUN_EQUAL if self.reproducible else RERUN_DIFFERS

    def __str__(self) -> str:
        if self.reproducible:
            same_loss = f"the same loss {self.loss:.6g}"
            if self.compares_gradients:
                same_loss += " and the same gradients"
            return f"the step gave {same_loss} again, so that the data or the model are the cause"
        listed = "; ".join(self.differences)
        return (
            f"the step gave other values again (loss {self.loss:.6g}, then {self.loss_again:.6g}; "
            f"{listed}), a sign of broken hardware or of kernels that are not deterministic"
        )

    def end_run(self, reason: str) -> NoReturn:
        """End the run on all ranks with exit code 16 or 17. All ranks call this together.

        Args:
            reason: Description of the wrong step, for the message.

        Raises:
            AgreedStop: Always.
        """
        rank_zero_warn(f"{reason}: {self}. The run ends with exit code {self.exit_code}.")
        raise AgreedStop(self.exit_code)


class OwnChanges(Protocol):
    """Watch of sharded gradients."""

    def own_change(self) -> AbstractContextManager[None]:
        """Return the context of a change of gradients by this package."""
        ...


class Gradients(Protocol):
    """Gradients of a fit, as a rerun needs them."""

    @property
    def accumulation(self) -> GradientAccumulation:
        """Holds the gradients."""
        ...

    @property
    def guard(self) -> OwnChanges:
        """Watches the gradients."""
        ...

    @property
    def loss_scaling(self) -> object | None:
        """Scales losses. None: no scale."""
        ...


class Rerun:
    """One rerun of the current step. All ranks run it together.

    Args:
        scope: The run context.
        training: Gradients of the fit.
        inputs: Inputs of the step.
        metrics: Synchronizes metrics.

    Raises:
        ConfigError: On all ranks, if there is no step to run again, or its inputs are gone.
    """

    def __init__(
        self, scope: RunContext, training: Gradients, inputs: RecordedStep, metrics: MetricSync
    ) -> None:
        self._scope = scope
        self._training = training
        self._inputs = inputs
        self._metrics = metrics
        # Under a loss scale the first gradients may be unscaled already.
        self._compares_gradients = training.loss_scaling is None
        self._refuse()
        self.batches = list(inputs.batches)
        """The batches to run, in order."""
        self._again: list[list[Tensor]] = []

    def _refuse(self) -> None:
        """Refuse the rerun on all ranks if a rank cannot run the step again. A collective."""
        self._refuse_settings()
        refusals = self._scope.context.axis("world").all_gather_object(self._refusal())
        if refusal := next(filter(None, refusals), ""):
            raise ConfigError(f"strategy.rerun_step(): {refusal}")

    def _refuse_settings(self) -> None:
        if not self._scope.module.automatic_optimization:
            raise ConfigError(
                "strategy.rerun_step() runs the step of one update again, and the module optimizes "
                "by hand, where a step may hold several updates. Use automatic optimization."
            )

    def _refusal(self) -> str:
        """Describe why this rank cannot run the step again. "": it can."""
        inputs = self._inputs
        if inputs.dropped_bytes:
            return (
                f"the batches of this step take more than {inputs.dropped_bytes / 2**20:,.0f} MiB "
                f"on a rank, and up to {HELD_BYTES >> 20} MiB are held for a rerun. Raise the "
                "batch size of the loader and set micro_batch_size, instead of "
                "accumulate_grad_batches."
            )
        if not inputs.is_complete or not inputs.batches:
            return (
                "called without a step that waits for its update. Call it between the last "
                "backward pass of a step and the update: in on_after_backward (not while gradients "
                "accumulate) or on_before_optimizer_step, on all ranks."
            )
        if any(versions(batch.batch) != batch.versions for batch in inputs.batches):
            return (
                "training_step has written into its batch, so that the step cannot run again on "
                "the same data. Write into a copy."
            )
        if late := inputs.late_buffers():
            return (
                f"the buffer {late[0]} was written for the first time since the last steps, and "
                "its value before this step is gone. Later steps can run again."
            )
        return ""

    def run(self, repeat: Repeat) -> RerunResult:
        """Run all batches again and compare. Gradients, random states, buffers, metrics and values
        on the module are the first run's afterwards.

        Args:
            repeat: Computes losses and gradients of a batch again, given the batch and indices.
        """
        inputs, accumulation = self._inputs, self._training.accumulation
        # The first run's gradients are put back at the end: a rerun compares, and changes nothing.
        first = {name: g.clone() for name, g in accumulation.reducer.gradients().items()}
        losses = [list(batch.losses) for batch in self.batches]
        states, buffers = inputs.states(), inputs.buffers_now()
        with self._training.guard.own_change(), unseen(self._scope, self._metrics):
            for target in accumulation.reducer.targets().values():
                target.grad = None
            for number, batch in enumerate(self.batches, 1):
                batch.losses.clear()
                inputs.batches[:] = [batch]
                inputs.restore(batch)
                is_last = number == len(self.batches)
                # Reduced once, with the last batch, as in the first run.
                with nullcontext() if is_last else accumulation.accumulating():
                    repeat(batch.batch, batch.indices)
                    accumulation.finish_run()
                self._again.append(list(batch.losses))
            again = accumulation.reducer.gradients()
            differences = [
                *_losses_apart(losses, self._again),
                *self._gradients_apart(first, again),
            ]
            self._restore(first)
        for batch, losses_before in zip(self.batches, losses, strict=True):
            batch.losses[:] = losses_before
        inputs.batches[:] = self.batches
        # A second rerun of the same step is possible.
        inputs.is_complete = True
        inputs.fill(buffers)
        inputs.restore_states(states)
        return self._agree(losses, differences)

    def _gradients_apart(
        self, first: Mapping[str, Tensor], again: Mapping[str, Tensor]
    ) -> list[str]:
        """Describe gradients with other values."""
        if not self._compares_gradients:
            return []
        names = [
            name
            for name in {**first, **again}
            if name not in first or name not in again or not _same(first[name], again[name])
        ]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return [f"gradient of {', '.join(names[:_LISTED])}{more}"] if names else []

    def _restore(self, first: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in self._training.accumulation.reducer.targets().items():
                value = first.get(name)
                if value is None or target.grad is None:
                    target.grad = value
                else:
                    target.grad.copy_(value)

    def _agree(self, losses: Sequence[Sequence[Tensor]], differences: list[str]) -> RerunResult:
        """Return the verdict of all ranks. A collective."""
        context = self._scope.context
        sums = [[float(x) for batch in run for x in batch] for run in (losses, self._again)]
        mine = ([sum(values) for values in sums], len(sums[0]), differences)
        ranks = context.axis("world").all_gather_object(mine)
        count = max(1, sum(number for _, number, _ in ranks))
        first, again = (sum(means[i] for means, _, _ in ranks) / count for i in range(2))
        listed = [
            f"rank {rank}: {difference}"
            for rank, (_, _, differences_of_rank) in enumerate(ranks)
            for difference in differences_of_rank
        ]
        return RerunResult(not listed, first, again, tuple(listed), self._compares_gradients)


def _losses_apart(
    first: Sequence[Sequence[Tensor]], again: Sequence[Sequence[Tensor]]
) -> list[str]:
    """Describe the first loss with another value."""
    for batch, (one, two) in enumerate(zip(first, again, strict=True)):
        for microbatch, (a, b) in enumerate(zip(one, two, strict=False)):
            if not _same(a, b):
                where = f"batch {batch}, " if len(first) > 1 else ""
                return [
                    f"loss of {where}micro-batch {microbatch}: {float(a):.9g}, then {float(b):.9g}"
                ]
        if len(one) != len(two):
            return [f"{len(one)} losses of batch {batch}, then {len(two)}"]
    return []


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values. NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
