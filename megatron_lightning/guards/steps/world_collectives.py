"""Refuse a user's collectives over all ranks in steps, and sums and gathers over them in hooks.

Ranks of a replica hold the same samples, so a collective over the world counts each value as often
as a replica has ranks, without an error. Under a pipeline only the last stage reaches the code
after the model, and would wait for the other stages.

The first step of each kind is watched call by call. Later steps are watched by the sequence number
of the default group: a local number, read before and after the step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import PipelineError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.parallel.origin import is_library_module
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

_COUNTING = ("all", "reduce", "gather")  # names of collectives that count copies
_COMPAT = "megatron_lightning.compat.process_groups"
_PASSING = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG)


class WorldCollectives(Guard):
    """Watch the default process group around the user's steps and hooks.

    Our own collectives are called on groups of their own wherever a replica has several ranks.
    """

    sentence = (
        "a step calls `torch.distributed` on all ranks, or a hook sums or gathers over all ranks: "
        "each value would count once for every rank of a replica, and under a pipeline the ranks "
        "would wait for each other"
    )
    may_warn = False

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._is_first = False  # batch of its loader
        self._is_dismissed = False

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a replica has several ranks."""
        return scope.context.layout.replica_size > 1

    def collective(self, name: str) -> None:
        """Stop watching this step: the user asked the strategy for a collective of all ranks."""
        self._is_dismissed = True

    def begin_batch(self, batch: StepBatch) -> None:
        """Follow the loaders."""
        self._is_first = batch.is_first

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Watch the step: in the first batch of a loader call by call, later by count.

        Raises:
            PipelineError: At the user's call, or after the step.
        """
        world = self.scope.context.axis("world").process_group
        # Where no collective of ours uses the default group in the step, a user's collectives on a
        # group kept from before are found by count, too.
        counts = self.scope.module.automatic_optimization or run.hook != "training_step"
        self._is_dismissed = False
        num_before = 0 if world is None else compat.num_collectives(world)

        def refuse(collective: str) -> None:
            if not self._is_dismissed:
                self._refuse(run.hook, f"torch.distributed's {collective}")

        with compat.watched_default_group(refuse) if self._is_first else nullcontext():
            yield
        num_calls = 0 if world is None else compat.num_collectives(world) - num_before
        if counts and num_calls and not self._is_dismissed:
            self._refuse(run.hook, "a collective of torch.distributed")

    def user_code(self, where: str, number: int) -> AbstractContextManager[None]:
        """Watch a hook. Barriers, broadcasts and reductions to a maximum, minimum or mean pass:
        copies of a value do not change them.

        Raises:
            PipelineError: At the user's call.
        """

        def refuse(collective: str) -> None:
            if collective.startswith(_COUNTING) and _counts_copies():
                self._refuse(where, f"torch.distributed's {collective}", in_step=False)

        return compat.watched_default_group(refuse)

    def _refuse(self, hook: str, collective: str, *, in_step: bool = True) -> None:
        layout, num_copies = self.scope.context.layout, self.scope.context.layout.replica_size
        axes = {"tensor": layout.tp, "context": layout.cp, "pipeline": layout.pp}
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        waits = (
            " Only the last pipeline stage reaches the code after the model, and would wait for "
            "the others."
            if layout.pp > 1 and in_step
            else ""
        )
        where = f"{hook} of {type(self.scope.module).__name__}" if in_step else hook
        parts = (
            " Sums over the parts of sequences, too, take group="
            "self.trainer.strategy.context.dp_cp.process_group."
            if layout.cp > 1
            else ""
        )
        self.judge.refuse(
            PipelineError(
                f"{where} called {collective} on the default process group of "
                f"all {dist.get_world_size()} ranks. {num_copies} of them ({sizes}) hold the "
                f"same samples, and each value would count {num_copies} times.{waits} Pass "
                "group=self.trainer.strategy.data_parallel_group, whose ranks hold different "
                f"samples, and ask it for sizes and ranks, too (dist.get_world_size(group)).{parts}"
            )
        )


def _counts_copies() -> bool:
    """Whether the collective being called is called by the user's code, and copies of a value
    change the result.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("torch.distributed") and frame.f_locals.get("op") in _PASSING:
            return False
        is_between = name.startswith("torch.") or name in {__name__, _COMPAT}
        if not is_between and frame.f_code.co_name != "__torch_function__":
            return not is_library_module(name) and not name.startswith("torchmetrics.")
        frame = frame.f_back
    return False
