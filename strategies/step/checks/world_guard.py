"""Refuse a user's collectives over all ranks in the first step of each kind.

Ranks of a replica hold the same samples, so a collective over the world counts each value as often
as a replica has ranks, without an error. Under a pipeline only the last stage reaches the code
after the model, and would wait for the other stages.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import PipelineError
from megatron_lightning.parallel.context import ParallelContext


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
        self._is_dismissed = False
        before = compat.num_collectives(world)

        def refuse(collective: str) -> None:
            if not self._is_dismissed:
                self._refuse(hook, f"torch.distributed's {collective}")

        with compat.watched_default_group(refuse):
            yield
        if counts and not self._is_dismissed and compat.num_collectives(world) != before:
            self._refuse(hook, "a collective of torch.distributed")

    def _refuse(self, hook: str, collective: str) -> NoReturn:
        layout = self._context.layout
        axes = {"tensor": layout.tp, "context": layout.cp, "pipeline": layout.pp}
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        waits = (
            " Only the last pipeline stage reaches the code after the model, and would wait for "
            "the others."
            if layout.pp > 1
            else ""
        )
        parts = (
            " Sums over the parts of sequences, too, take group="
            "self.trainer.strategy.context.dp_cp.process_group."
            if layout.cp > 1
            else ""
        )
        raise PipelineError(
            f"{hook} of {self._module_name} called {collective} on the default process group of "
            f"all {dist.get_world_size()} ranks. {self._num_copies} of them ({sizes}) hold the "
            f"same samples, and each value would count {self._num_copies} times.{waits} Pass "
            "group=self.trainer.strategy.data_parallel_group, whose ranks hold different samples, "
            f"and ask it for sizes and ranks, too (dist.get_world_size(group)).{parts}"
        )
