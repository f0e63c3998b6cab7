"""Refuse a user's collectives over all ranks in steps, and sums and gathers over them in hooks.

Ranks of a replica hold the same samples, so a collective over the world counts each value as often
as a replica has ranks, without an error. Under a pipeline only the last stage reaches the code
after the model, and would wait for the other stages.

The first step of each kind is watched call by call. Later steps are watched by the sequence number
of the default group: a local number, read before and after the step.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import PipelineError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.origin import is_library_module

_COUNTING = ("all", "reduce", "gather")  # names of collectives that count copies
_COMPAT = "megatron_lightning.compat.process_groups"
_PASSING = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG)


class WorldGuard:
    """Watch of the default process group around a user's step.

    Our own collectives are called on groups of their own wherever a replica has several ranks.

    Args:
        module_name: Class of the user's module, for the message.
        context: Groups of this rank.
    """

    def __init__(self, module_name: str, context: ParallelContext) -> None:
        self._module_name = module_name
        self._context = context
        self._num_copies = context.layout.replica_size
        self._is_dismissed = False

    def dismiss(self) -> None:
        """Stop watching this step, since the user asked the strategy for a collective of all
        ranks.
        """
        self._is_dismissed = True

    @contextmanager
    def watching(self, hook: str, *, counts: bool) -> Generator[None, None, None]:
        """Enter around a call of ``hook``.

        Args:
            hook: The user's step.
            counts: Whether no collective of ours uses the default group in the step. A user's
                collectives on a group kept from before are then found, too.

        Raises:
            PipelineError: At the user's call, or after the step.
        """
        world = self._context.axis("world").process_group
        if self._num_copies == 1 or world is None:
            yield
            return

        def refuse(collective: str) -> None:
            if not self._is_dismissed:
                self._refuse(hook, f"torch.distributed's {collective}")

        with self.counting(hook, counts=counts), compat.watched_default_group(refuse):
            yield

    @contextmanager
    def counting(self, hook: str, *, counts: bool) -> Generator[None, None, None]:
        """Enter around a later call of ``hook``. For arguments see :meth:`watching`.

        Raises:
            PipelineError: After the step.
        """
        world = self._context.axis("world").process_group
        if self._num_copies == 1 or world is None:
            yield
            return
        self._is_dismissed = False
        num_before = compat.num_collectives(world)
        yield
        if counts and not self._is_dismissed and compat.num_collectives(world) != num_before:
            self._refuse(hook, "a collective of torch.distributed")

    @contextmanager
    def watching_hook(self, hook: str) -> Generator[None, None, None]:
        """Enter around a hook of the user's outside of steps. Barriers, broadcasts and reductions
        to a maximum, minimum or mean pass: copies of a value do not change them.

        Raises:
            PipelineError: At the user's call.
        """
        if self._num_copies == 1 or self._context.axis("world").process_group is None:
            yield
            return

        def refuse(collective: str) -> None:
            if collective.startswith(_COUNTING) and _counts_copies():
                self._refuse(hook, f"torch.distributed's {collective}", in_step=False)

        with compat.watched_default_group(refuse):
            yield

    def _refuse(self, hook: str, collective: str, *, in_step: bool = True) -> NoReturn:
        layout = self._context.layout
        axes = {"tensor": layout.tp, "context": layout.cp, "pipeline": layout.pp}
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        waits = (
            " Only the last pipeline stage reaches the code after the model, and would wait for "
            "the others."
            if layout.pp > 1 and in_step
            else ""
        )
        where = f"{hook} of {self._module_name}" if in_step else hook
        parts = (
            " Sums over the parts of sequences, too, take group="
            "self.trainer.strategy.context.dp_cp.process_group."
            if layout.cp > 1
            else ""
        )
        raise PipelineError(
            f"{where} called {collective} on the default process group of "
            f"all {dist.get_world_size()} ranks. {self._num_copies} of them ({sizes}) hold the "
            f"same samples, and each value would count {self._num_copies} times.{waits} Pass "
            "group=self.trainer.strategy.data_parallel_group, whose ranks hold different samples, "
            f"and ask it for sizes and ranks, too (dist.get_world_size(group)).{parts}"
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
