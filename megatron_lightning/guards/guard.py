"""Base of all guards.

A guard is a class in a file, and a line in ``table.py``. Its methods are windows of the step
protocol (``step/participant.py``). The name of the guard is the name of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from megatron_lightning.config import GuardOptions
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.step.judge import Judge
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Objects of a run that trains."""

    accumulation: GradientAccumulation
    """Holds the gradients."""
    optimizers: Sequence[Optimizer]
    """The user's."""


class Guard(StepParticipant):
    """Search for one kind of mistake in the user's code. Changes nothing: losses and weights are
    the same without the guard.

    Args:
        scope: The run context.
        fit: Objects of training. None: the run does not fit.
    """

    sentence: ClassVar[str]
    """One line about findings, for ``docs/differences.md``."""
    may_warn: ClassVar[bool] = True
    """Whether training can continue after a finding. False: a hang, a crash or a loss of data would
    follow, so that the guard refuses in every mode, unless its name is ignored.
    """

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        self.scope = scope
        options, fired = scope.options.guards, scope.progress.fired
        self.judge = Judge(self.title(), options, fired, may_warn=self.may_warn)

    @classmethod
    def title(cls) -> str:
        """Return the name of the guard."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def judge_of(cls, scope: RunContext) -> Judge | None:
        """Return the judge of a guard whose facts come from elsewhere. None: the guard is off."""
        return cls(scope).judge if cls.is_on(scope.options.guards) else None

    @classmethod
    def is_on(cls, options: GuardOptions) -> bool:
        """Return whether the options leave the guard on. Equal on all ranks."""
        return cls.title() not in options.ignore and (options.mode != "ignore" or not cls.may_warn)

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether the layout and the run have anything to find. Equal on all ranks."""
        return True
